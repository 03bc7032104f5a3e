"""torchrun's command line: what saferun passes on means to torchrun what the user meant."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import check_cases
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from repo import source

from saferun.errors import UsageError
from saferun.knowledge.torchrun_options import OPTIONS, TABLE_TORCH
from saferun.model import CommandLine
from saferun.plan.torchrun_args import (
    LAUNCH_ONLY,
    OWN,
    launch_only,
    launch_options,
    parse,
    value_of,
)

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(os.environ.get("SAFERUN_CORPUS", ROOT.parent / "shared" / "corpus"))
COMMANDS = CORPUS / "torchrun_commands.jsonl"

AMBIGUOUS_LOG = (
    "ambiguous option: --log could match --log-dir, --log_dir, --logs-specs, --logs_specs"
)
NO_SCRIPT = "the following arguments are required: training_script, training_script_args"
# CPython's later argparse argv some refusals otherwise, and accepts what 3.10 and 3.11 refuse.
OLD_ARGPARSE = sys.version_info < (3, 12)
PET_ENVIRONMENTS = {
    "none": {},
    "values": {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "3", "PET_RDZV_ID": ""},
    "flags": {"PET_STANDALONE": "1", "PET_MODULE": "1", "PET_NO_PYTHON": "0", "PET_TEE": "3"},
}


class RefusedError(Exception):
    """The error message with which the real parser refuses a line."""


class RealParser:
    """torchrun's own parser, as the installed torch builds it with some PET_ variables."""

    def __init__(self, environ):
        run = pytest.importorskip("torch.distributed.run")
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("PET_")]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            self.parser = run.get_args_parser()
        self.parser.error = self._refuse
        self._action("numa_binding").choices = None  # they differ by version: left to torchrun
        self.parser.print_help = lambda: self._refuse("HELP")

    def _action(self, dest):
        return next(action for action in self.parser._actions if action.dest == dest)

    def _refuse(self, message):
        raise RefusedError(message)

    def __call__(self, argv):
        """Return the namespace as a dict, or the message as a string."""
        try:
            return vars(self.parser.parse_args(list(argv)))
        except RefusedError as refused:
            return str(refused)


@pytest.fixture(scope="session")
def reals() -> dict[str, RealParser]:
    return {name: RealParser(environ) for name, environ in PET_ENVIRONMENTS.items()}


@pytest.fixture(scope="session")
def real(reals: dict[str, RealParser]) -> RealParser:
    return reals["none"]


def same_reading(line: CommandLine, outcome) -> bool:
    """Whether our reading of a line is the one that torchrun's parser has of it."""
    if isinstance(outcome, str):
        return (line.script, line.script_args) == (None, ()) and (
            "help" in line.given and line.refusal is None
            if outcome == "HELP"
            else line.refusal == outcome or (not OLD_ARGPARSE and line.refusal is not None)
        )
    return (
        line.refusal is None
        and line.script == outcome["training_script"]
        and list(line.script_args) == outcome["training_script_args"]
    )


# --- the table


def test_the_table_is_that_of_the_installed_torch_field_by_field(real):
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith(TABLE_TORCH + "."):
        pytest.skip(f"the table is of torch {TABLE_TORCH}, here is {torch.__version__}")
    from torch.distributed.argparse_util import check_env, env

    expected = [
        (
            action.dest,
            tuple(action.option_strings),
            action.nargs == 0,
            "PET_" + action.dest.upper() if isinstance(action, (env, check_env)) else None,
        )
        for action in real.parser._actions
        if action.option_strings
    ]
    assert [tuple(option) for option in OPTIONS] == expected


def test_no_option_of_ours_is_an_option_or_an_abbreviation_of_torchruns():
    strings = [string for option in OPTIONS for string in option.strings]
    assert not [own for own in OWN for string in strings if string.startswith(own)]


def test_importing_the_grammar_stays_light():
    heavy = {"argparse", "dataclasses", "subprocess", "json", "pathlib", "shlex", "inspect"}
    code = "import sys, saferun.plan.torchrun_args; print(*sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    out = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {environ['PYTHONPATH']!r}); {code}",
        ],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not heavy & set(out.stdout.split())


# --- public command lines


@pytest.fixture(scope="module")
def corpus() -> dict[str, tuple[Any]]:
    if not COMMANDS.exists():
        pytest.skip(f"no corpus at {COMMANDS} (SAFERUN_CORPUS names another place)")
    records = map(json.loads, COMMANDS.read_text(encoding="utf-8").splitlines())
    return {record["id"]: (record,) for record in records}


def test_a_public_command_line_means_to_torchrun_what_it_meant(corpus, reals):
    def check(record):
        line = parse(record["argv"]).line
        if record.get("parse_error", "").startswith("ambiguous option: --log"):
            safe = list(record["argv"])
            safe.insert(safe.index("main"), "--")
            for real in reals.values():
                assert real(line.args) == real(safe)
            assert same_reading(line, reals["none"](safe))
            return
        assert list(line.args) == record["argv"]
        assert line.script == record["script"]
        assert list(line.script_args) == record["script_args"]
        assert line.refusal == record.get("parse_error")

    check_cases(corpus, check)


def test_our_options_in_a_public_command_line_change_nothing_for_torchrun(corpus):
    ours = ["--profile", "h100", "--set=env.X=a b", "--dry-run"]

    def check(record):
        parsed = parse(ours + record["argv"])
        assert parsed.line == parse(record["argv"]).line
        assert [name for name, _ in parsed.own] == ["--profile", "--set", "--dry-run"]

    check_cases(corpus, check)


# --- the rules that are easy to miss

READINGS = {
    "nothing but a script": (["train.py"], "train.py", []),
    "dash and underscore": (["--nproc-per-node=2", "--nproc_per_node", "3", "t.py"], "t.py", []),
    "-m away from its module": (["-m", "--nnodes", "1", "pkg.mod", "-m"], "pkg.mod", ["-m"]),
    "-t3": (["-t3", "t.py"], "t.py", []),
    "-t 3": (["-t", "3", "t.py"], "t.py", []),
    "-r=0:1,1:2": (["-r=0:1,1:2", "t.py"], "t.py", []),
    "-mt3 is -m -t 3": (["-mt3", "mod"], "mod", []),
    "-mt 3 is -m -t 3": (["-mt", "3", "mod"], "mod", []),
    "unique abbreviations": (["--nn", "1", "--stand", "--nproc-=2", "t.py"], "t.py", []),
    "negative number as value": (["--node-rank", "-1", "t.py"], "t.py", []),
    "decimal negative number": (["--monitor-interval", "-.5", "t.py"], "t.py", []),
    "word with a blank as value": (["--rdzv-conf", "-a b", "t.py"], "t.py", []),
    "our option with a blank as value": (["--rdzv-id", "--profile=a b", "t.py"], "t.py", []),
    "empty value": (["--rdzv-id", "", "--role=", "t.py"], "t.py", []),
    "a lone dash as value": (["--rdzv-id", "-", "t.py"], "t.py", []),
    "a lone dash as script": (["-", "x"], "-", ["x"]),
    "an empty script": (["", "x"], "", ["x"]),
    "a negative number as script": (["-7", "x"], "-7", ["x"]),
    "a script with a blank": (["-x script.sh", "x"], "-x script.sh", ["x"]),
    "-- before the script is swallowed": (["--", "t.py", "a"], "t.py", ["a"]),
    "-- after the script is swallowed": (["t.py", "--", "a"], "t.py", ["a"]),
    "only the first -- is swallowed": (["--", "t.py", "--", "a"], "t.py", ["--", "a"]),
    "a second -- after the script": (["t.py", "--", "--", "a"], "t.py", ["--", "a"]),
    "a later -- is the script's": (["t.py", "a", "--", "b"], "t.py", ["a", "--", "b"]),
    "-- as the script": (["--", "--", "x"], "--", ["x"]),
    "an option behind -- is the script": (["--", "--nnodes", "2"], "--nnodes", ["2"]),
    "our option behind -- is the script": (["--", "--dry-run"], "--dry-run", []),
    "our options behind the script": (
        ["t.py", "--profile", "x", "--dry-run", "--set"],
        "t.py",
        ["--profile", "x", "--dry-run", "--set"],
    ),
    "torchrun's options behind the script": (
        ["t.py", "--nnodes=2", "--standal", "--nn", "-t3", "-mx", "-h"],
        "t.py",
        ["--nnodes=2", "--standal", "--nn", "-t3", "-mx", "-h"],
    ),
    "--no-python": (["--no-python", "bash", "-c", "exit 3"], "bash", ["-c", "exit 3"]),
    "a command's name as script": (["plan", "--json"], "plan", ["--json"]),
    "unicode": (["--role", "größe", "träin.py", "--ü", "日本"], "träin.py", ["--ü", "日本"]),
}


def test_a_line_is_passed_on_unchanged_and_read_as_torchrun_reads_it(reals):
    def check(argv, script, script_args):
        parsed = parse(argv)
        assert parsed.line.args == tuple(argv)
        assert (parsed.line.script, list(parsed.line.script_args)) == (script, script_args)
        for real in reals.values():
            assert same_reading(parsed.line, real(argv))
        assert parsed.own == ()

    check_cases(READINGS, check)


REFUSALS = {
    "nothing": ([], NO_SCRIPT),
    "only options": (["--nnodes", "1"], NO_SCRIPT),
    "only --": (["--standalone", "--"], NO_SCRIPT),
    "unknown option": (["--frobnicate", "t.py"], "unrecognized arguments: --frobnicate"),
    "unknown options": (["--a", "-x", "--b=c", "t.py"], "unrecognized arguments: --a -x --b=c"),
    "an abbreviation of ours": (["--prof=h100", "t.py"], "unrecognized arguments: --prof=h100"),
    "ambiguous": (
        ["--nproc", "2", "t.py"],
        "ambiguous option: --nproc could match --nproc-per-node, --nproc_per_node",
    ),
    "ambiguous with value": (["--log=x", "t.py"], AMBIGUOUS_LOG.replace("--log c", "--log=x c")),
    "ambiguous as value": (["--role", "--log", "t.py"], AMBIGUOUS_LOG),
    "option as value": (["--nnodes", "-m", "t.py"], "argument --nnodes: expected one argument"),
    "our option as value": (
        ["--nnodes", "--dry-run", "t.py"],
        "argument --nnodes: expected one argument",
    ),
    "-- as value": (["-t", "--", "t.py"], "argument -t/--tee: expected one argument"),
    "no value left": (["--role"], "argument --role: expected one argument"),
    "flag with value": (
        ["--no-python=1", "t.py"],
        "argument --no-python/--no_python: ignored explicit argument '1'",
    ),
    "short flag with tail": (
        ["-mx", "t.py"],
        "argument -m/--module: ignored explicit argument 'x'",
    ),
    "not a number": (
        ["--max-restarts", "two", "t.py"],
        "argument --max-restarts/--max_restarts: invalid int value: 'two'",
    ),
    "not a choice": (
        ["--start-method=thread", "t.py"],
        "argument --start-method/--start_method: invalid choice: 'thread' "
        "(choose from 'spawn', 'fork', 'forkserver')",
    ),
    "use_env": (["--use_env", "t.py", "a"], "unrecognized arguments: --use_env"),
}


def test_what_torchrun_refuses_is_refused_with_its_own_message(real):
    def check(argv, message):
        line = parse(argv).line
        assert line.refusal == message
        assert (line.script, line.script_args) == (None, ())
        assert line.args == tuple(argv)
        assert same_reading(line, real(argv))

    check_cases(REFUSALS, check)


def test_an_attached_double_dash_is_left_to_torchrun():
    """CPython before 3.13 drops it, later versions refuse it because it is not a number."""
    line = parse(["--max-restarts=--", "t.py"]).line
    assert (line.args, line.refusal) == (("--max-restarts=--", "t.py"), None)


def test_help_is_neither_a_script_nor_a_refusal(real):
    line = parse(["--nnodes=2", "--he", "t.py"]).line
    assert (line.script, line.refusal) == (None, None)
    assert line.given == {"nnodes": "2", "help": ""}
    assert real(line.args) == "HELP"


AMBIGUOUS_ARGS = {
    "a flag": (["t.py", "--log"], ["--", "t.py", "--log"]),
    "with a value": (["t.py", "--run=3", "x"], ["--", "t.py", "--run=3", "x"]),
    "after options": (["-t", "3", "t.py", "--node", "1"], ["-t", "3", "--", "t.py", "--node", "1"]),
    "before a -- of the script's own": (
        ["t.py", "a", "--log", "--", "b"],
        ["--", "t.py", "a", "--log", "--", "b"],
    ),
    "behind a swallowed --": (["t.py", "--", "--log"], ["t.py", "--", "--log"]),
    "behind a -- before the script": (["--", "t.py", "--log"], ["--", "t.py", "--log"]),
    "behind a later --": (["t.py", "a", "--", "--log"], ["t.py", "a", "--", "--log"]),
    "ours before": (["--profile", "x", "t.py", "--log"], ["--", "t.py", "--log"]),
}


def test_an_ambiguous_argument_of_the_script_reaches_the_script(real):
    def check(argv, passed):
        line = parse(argv).line
        assert list(line.args) == passed
        assert same_reading(line, real(passed))
        assert not isinstance(real(passed), str)

    check_cases(AMBIGUOUS_ARGS, check)


def test_use_env_gets_clear_advice():
    for word in ("--use_env", "--use-env"):
        line = parse([word, "t.py"]).line
        assert launch_only(line) == LAUNCH_ONLY[word]
        assert "leave it out" in LAUNCH_ONLY[word]
        assert parse([word, "t.py"]).unsure == ()
    assert launch_only(parse(["t.py", "--use_env"]).line) is None
    assert launch_only(parse(["--other", "t.py"]).line) is None


# --- our own options


def test_our_options_are_taken_out_in_order_and_repeat():
    before = ["--profile", "h100", "-m", "--set", "a=1", "--set=b=2=3", "--retries=2"]
    after = ["--nnodes", "2", "--run-dir", "/r", "--dry-run", "mod", "--set", "c=3"]
    parsed = parse([*before, *after])
    assert parsed.own == (
        ("--profile", "h100"),
        ("--set", "a=1"),
        ("--set", "b=2=3"),
        ("--retries", "2"),
        ("--run-dir", "/r"),
        ("--dry-run", ""),
    )
    assert parsed.line.args == ("-m", "--nnodes", "2", "mod", "--set", "c=3")
    assert parsed.unsure == ()


@pytest.mark.parametrize("name", [name for name, value in OWN.items() if value])
@pytest.mark.parametrize(
    "tail",
    [[], ["--nnodes", "2", "t.py"], ["--", "t.py"], ["--dry-run", "t.py"], ["", "t.py"]],
    ids=["end", "torchrun's option", "--", "our option", "empty"],
)
def test_our_option_without_its_value_is_a_usage_error(name, tail):
    with pytest.raises(UsageError, match=f"{name} needs a value") as error:
        parse([name, *tail])
    assert error.value.code == 2
    assert error.value.where
    assert f"{name}=" in error.value.fix


def test_an_empty_value_behind_equals_is_missing_too():
    with pytest.raises(UsageError, match="--profile needs a value"):
        parse(["--profile=", "t.py"])


def test_our_flag_refuses_a_value():
    with pytest.raises(UsageError, match="--dry-run takes no value"):
        parse(["--dry-run=yes", "t.py"])


def test_a_command_may_have_other_options_of_its_own():
    own = {**OWN, "--json": None, "-o": "FILE"}
    parsed = parse(["--json", "-o", "x", "-t3", "t.py", "--json"], own=own)
    assert parsed.own == (("--json", ""), ("-o", "x"))
    assert parsed.line.args == ("-t3", "t.py", "--json")


@pytest.mark.parametrize("ours", [["--dry-run"], ["--profile", "x"], ["--set=a=b"]])
def test_our_option_between_an_option_and_its_value_is_torchruns_error(ours, real):
    argv = ["--standalone", "--nnodes", *ours, "2", "t.py"]
    line = parse(argv).line
    assert line.args == tuple(argv)
    assert line.refusal == real(argv) == "argument --nnodes: expected one argument"


# --- what another torch may read differently

UNSURE = {
    "exact argv": (["--nnodes", "2", "-mt3", "--tee=3", "mod", "--x"], ()),
    "unknown": (["--new-thing", "t.py"], ("--new-thing",)),
    "unknown with value": (["--new-thing=3", "-x", "t.py"], ("--new-thing=3", "-x")),
    "unique abbreviation": (["--nnode=2", "--standa", "t.py"], ("--nnode=2", "--standa")),
    "ambiguous abbreviation": (["--log", "x", "t.py"], ("--log",)),
    "ours": (["--profile", "x", "t.py"], ()),
    "script arguments": (["t.py", "--nn", "--new"], ()),
}


def test_arguments_that_the_table_does_not_settle_are_named():
    def check(argv, unsure):
        assert parse(argv).unsure == unsure

    check_cases(UNSURE, check)


def test_another_torchs_table_settles_them():
    newer = (*OPTIONS, OPTIONS[1]._replace(dest="new_thing", strings=("--new-thing",)))
    argv = ["--new-thing", "3", "--profile", "x", "t.py"]
    assert parse(argv).line.refusal == "unrecognized arguments: --new-thing"
    parsed = parse(argv, options=newer)
    assert (parsed.line.script, parsed.line.given, parsed.unsure) == (
        "t.py",
        {"new_thing": "3"},
        (),
    )
    assert parsed.own == (("--profile", "x"),)


# --- settings


def line_of(*argv):
    return parse([*argv, "t.py"]).line


def test_the_last_value_given_counts_and_flags_are_empty_text():
    line = line_of("--nnodes", "1", "--nnodes=2", "-t3", "--redirects", "", "-m", "--standalone")
    assert line.given == {
        "nnodes": "2",
        "tee": "3",
        "redirects": "",
        "module": "",
        "standalone": "",
    }


SETTINGS = {
    "given": (["--tee", "3"], {"PET_TEE": "1"}, "tee", "3"),
    "given empty": (["--tee="], {"PET_TEE": "1"}, "tee", ""),
    "exported": ([], {"PET_NPROC_PER_NODE": "gpu"}, "nproc_per_node", "gpu"),
    "exported empty": ([], {"PET_RDZV_ID": ""}, "rdzv_id", ""),
    "neither": ([], {"NNODES": "2"}, "nnodes", None),
    "no PET_ for it": ([], {"PET_NUMA_BINDING": "node"}, "numa_binding", None),
    "flag given": (["--standalone"], {"PET_STANDALONE": "0"}, "standalone", ""),
    "flag exported on": ([], {"PET_STANDALONE": "1"}, "standalone", ""),
    "flag exported off": ([], {"PET_STANDALONE": "0"}, "standalone", None),
    "flag exported unreadable": ([], {"PET_STANDALONE": "yes"}, "standalone", None),
    "an option of another torch": ([], {"PET_NEW_THING": "x"}, "new_thing", "x"),
}


def test_an_option_comes_from_the_line_else_from_the_environment():
    def check(argv, environ, dest, value):
        assert value_of(line_of(*argv), environ, dest) == value

    check_cases(SETTINGS, check)


@pytest.mark.parametrize(
    ("argv", "environ", "nodes"),
    [
        ([], {}, 1),
        (["--nnodes", "2"], {"PET_NNODES": "3"}, 2),
        (["--nnodes=1:4"], {}, 4),
        ([], {"PET_NNODES": "2:8"}, 8),
        (["--nnodes", "1:2:3"], {}, None),
        (["--nnodes", "$N"], {}, None),
        (["--nnodes="], {}, None),
        (["--nnodes", "x:2"], {}, None),
    ],
)
def test_max_nodes_is_the_upper_end(argv, environ, nodes):
    assert launch_options(line_of(*argv), environ).nodes == nodes


@pytest.mark.parametrize(
    ("argv", "environ", "restarts"),
    [
        ([], {}, 0),
        (["--max-restarts", "3"], {"PET_MAX_RESTARTS": "1"}, 3),
        ([], {"PET_MAX_RESTARTS": "1"}, 1),
        ([], {"PET_MAX_RESTARTS": "many"}, 0),
        ([], {"PET_MAX_RESTARTS": ""}, 0),
    ],
)
def test_max_restarts_counts_torchruns_own(argv, environ, restarts):
    assert launch_options(line_of(*argv), environ).restarts == restarts


# --- generated command lines

LONG = [string for option in OPTIONS[1:] for string in option.strings if string.startswith("--")]
INTEGERS = {"max_restarts", "node_rank", "master_port", "shutdown_timeout"}
STRANGE = ["", "-", "-1", "-.5", "a b", "-a b", "--profile=a b", "größe", "\udcff", "x=y", "\n"]
NASTY = [
    *STRANGE,
    *("--", "--profile", "--set", "--set=a=b", "--dry-run", "--retries=2", "--run-dir"),
    *("--nnodes", "--nnodes=3", "--nproc", "--log", "--log=x", "--run", "--node", "--standal"),
    *("-m", "-mx", "-mt3", "-t", "-h", "--help", "--use_env", "--lr", "--=x", "-=x", "--unknown=1"),
    *("--mod", "plan", "run", "-1e5", "--nnodes=--", "--module=x", "--m", "-r=", "-mr"),
]


def unique_abbreviations():
    for option in OPTIONS[1:]:
        for full in (string for string in option.strings if string.startswith("--")):
            for end in range(3, len(full)):
                if sum(string.startswith(full[:end]) for string in [*LONG, "--help"]) == 1:
                    yield option, full[:end]


ABBREVIATED = list(unique_abbreviations())


def values_of(option):
    if option.dest in INTEGERS:
        return st.integers(-99, 99).map(str)
    if option.dest == "monitor_interval":
        return st.sampled_from(["0.5", "-1", "-.5", "3"])
    if option.dest == "start_method":
        return st.sampled_from(["spawn", "fork"])
    if option.dest == "numa_binding":
        return st.sampled_from(["node", "socket"])
    return st.sampled_from([*STRANGE, "2", "gpu", "host:29400", "a=1,b=2"])


@st.composite
def torchrun_words(draw):
    """One of torchrun's options with its value, in one of its spellings."""
    if draw(st.integers(0, 4)) == 0:
        option, string = draw(st.sampled_from(ABBREVIATED))
    else:
        option = draw(st.sampled_from(OPTIONS[1:]))
        string = draw(st.sampled_from(option.strings))
    if option.flag:
        return [string]
    value = draw(values_of(option))
    if draw(st.booleans()):
        return [string, value]
    if len(string) == 2 and value and draw(st.booleans()):
        return [draw(st.sampled_from(["-m" + string[1], string])) + value.lstrip("=")]
    return [string + "=" + value]


own_words = st.sampled_from(
    [
        ["--profile", "h100"],
        ["--profile=a b"],
        ["--set", "env.X=-1"],
        ["--set=a=--nnodes"],
        ["--dry-run"],
    ]
)
script_words = st.sampled_from(["train.py", "pkg.mod", "-", "", "-5", "-x y", "plan", "träin.py"])
script_args_words = st.lists(st.sampled_from(NASTY) | st.text(max_size=5), max_size=6)


@st.composite
def command_lines(draw):
    """The user's arguments; the same without saferun's; the latter with `--` before the script."""
    argv, bare = [], []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.integers(0, 3)) == 0:
            argv += draw(own_words)
        else:
            chunk = draw(torchrun_words())
            argv, bare = argv + chunk, bare + chunk
    script, rest = draw(script_words), draw(script_args_words)
    tail = draw(st.sampled_from([["--", script], [script, "--"], [script]]))
    read = rest[1:] if tail == [script] and rest[:1] == ["--"] else rest
    return argv + tail + rest, bare + tail + rest, [*bare, "--", script, *read]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=command_lines(), environment=st.sampled_from(list(PET_ENVIRONMENTS)))
def test_a_generated_line_means_to_torchrun_what_it_meant(lines, environment, reals):
    argv, bare, safe = lines
    real = reals[environment]
    parsed = parse(argv)
    meant = real(bare)
    if isinstance(meant, str):
        assert meant.startswith("ambiguous option: ")
        meant = real(safe)
    else:
        assert list(parsed.line.args) == bare or (not OLD_ARGPARSE and "--" in parsed.line.args)
    assert not isinstance(meant, str)
    assert real(parsed.line.args) == meant
    assert same_reading(parsed.line, meant)
    for dest, text in parsed.line.given.items():
        assert value_of(parsed.line, PET_ENVIRONMENTS[environment], dest) == text


fuzz_words = st.lists(
    st.sampled_from(NASTY + [string for option in OPTIONS for string in option.strings] + ["3"])
    | st.sampled_from(["t.py", "--rdzv", "--monitor-interval=x", "-m=r3", "-mm", "-tx", "-rh"]),
    max_size=7,
)


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(argv=fuzz_words)
@example(argv=["-mr", "--", "x"])
@example(argv=["--use_env", "t.py", "--log"])
@example(argv=["--unknown=1", "-h", "--log"])
def test_any_arguments_are_read_or_refused_as_torchrun_does(argv, real):
    argv = [word for word in argv if word.partition("=")[0] not in OWN]
    if not OLD_ARGPARSE:
        argv = [word for word in argv if word not in DIFFERS]
    line = parse(argv).line
    assert same_reading(line, real(line.args)), line
    if line.args != tuple(argv):
        assert str(real(argv)).startswith("ambiguous option: ") or not OLD_ARGPARSE
        assert [w for w in line.args if w != "--"] == [w for w in argv if w != "--"]
        rest = argv[argv.index(line.args[line.args.index("--") + 1]) :]
        assert len(rest) > 1


# --- other Pythons' argparse

# Versions differ on these: only that the arguments are passed on unchanged can be tested.
DIFFERS = ("-m=r3", "-1e5", "--nnodes=--", "-=x", "-mm", "-mx")


def interpreters():
    home = Path.home() / ".pyenv" / "versions"
    for minor in ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14"):
        found = [*sorted(home.glob(minor + ".*/bin/python")), Path(f"/usr/bin/python{minor}")]
        path = next((path for path in found if path.exists()), None)
        skip = [] if path else [pytest.mark.skip(reason=f"no Python {minor} on this machine")]
        yield pytest.param(path, minor, id=minor, marks=skip)


def fixed_lines():
    """A thousand lines, the same in every run: only one start for each interpreter."""
    pick = random.Random(120601)
    pool = [*NASTY, *LONG, "-t", "-r", "-m", "t.py", "t.py", "x", "2", "3"]
    pool = [word for word in pool if word not in DIFFERS and "\udcff" not in word]
    yield from ([*map(pick.choice, [pool] * pick.randint(1, 6))] for _ in range(1000))
    yield from (argv for argv, _, _ in READINGS.values())
    yield from (argv for argv, _ in REFUSALS.values())
    yield from (argv for argv, _ in AMBIGUOUS_ARGS.values())
    yield from (["--standalone", "t.py", *argv] for argv in (["--log"], ["a", "--", "--log"]))


def texts(namespace):
    """The values that the line set, as text, without the positionals."""
    positional = ("training_script", "training_script_args")
    return {k: v for k, v in namespace.items() if v is not None and k not in positional}


@pytest.mark.parametrize(("python", "minor"), list(interpreters()))
def test_every_pythons_argparse_reads_the_same(python, minor):
    lines = []
    for argv in fixed_lines():
        try:
            parsed = parse(argv)
        except UsageError:
            continue
        if not parsed.own:
            lines.append((argv, parsed.line))
    case = {"options": OPTIONS, "pairs": [[argv, line.args] for argv, line in lines]}
    out = subprocess.run(
        [python, "-I", "-c", source("plan/read_with_argparse")],
        input=json.dumps(case),
        capture_output=True,
        text=True,
        check=True,
    )
    for (argv, line), (theirs, ours) in zip(lines, json.loads(out.stdout), strict=True):
        if "invalid" in (line.refusal or ""):
            continue  # the rebuilt parser checks no values
        if isinstance(theirs, str) and not theirs.startswith("ambiguous"):
            assert isinstance(ours, str), argv
        elif not isinstance(theirs, str):
            assert ours == theirs, argv
        if line.refusal is None and "help" not in line.given:
            assert same_reading(line, ours), (argv, ours)
            assert texts(ours) == line.given, argv
        elif minor in ("3.10", "3.11"):
            assert same_reading(line, ours), (argv, ours)
        else:
            assert isinstance(ours, str), (argv, ours)
