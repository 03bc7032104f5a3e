"""Any command line is read or refused as argparse does it, of this Python and of others."""

import json
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from repo import source
from torchrun_lines import (
    AMBIGUOUS_ARGS,
    OLD_ARGPARSE,
    PET_ENVIRONMENTS,
    READINGS,
    REFUSALS,
    installed_options,
    same_reading,
)

from saferun.errors import UsageError
from saferun.planning.torchrun.torchrun_args import OWN, parse, value_of

HERE = installed_options()
OPTIONS = [option for option in HERE if option.dest != "print_completion"]  # it ends torchrun
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
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=command_lines(), environment=st.sampled_from(list(PET_ENVIRONMENTS)))
def test_a_generated_line_means_to_torchrun_what_it_meant(lines, environment, reals):
    argv, bare, safe = lines
    real = reals[environment]
    parsed = parse(argv, options=HERE)
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
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(argv=fuzz_words)
@example(argv=["-mr", "--", "x"])
@example(argv=["--use_env", "t.py", "--log"])
@example(argv=["--unknown=1", "-h", "--log"])
def test_any_arguments_are_read_or_refused_as_torchrun_does(argv, real):
    argv = [word for word in argv if word.partition("=")[0] not in OWN]
    if not OLD_ARGPARSE:
        argv = [word for word in argv if word not in DIFFERS]
    line = parse(argv, options=HERE).line
    assert same_reading(line, real(line.args)), line
    if line.args != tuple(argv):
        assert str(real(argv)).startswith("ambiguous option: ") or not OLD_ARGPARSE
        assert [w for w in line.args if w != "--"] == [w for w in argv if w != "--"]
        rest = argv[argv.index(line.args[line.args.index("--") + 1]) :]
        assert len(rest) > 1


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
            parsed = parse(argv, options=HERE)
        except UsageError:
            continue
        if not parsed.own:
            lines.append((argv, parsed.line))
    case = {"options": HERE, "pairs": [[argv, line.args] for argv, line in lines]}
    out = subprocess.run(
        [python, "-I", "-c", source("planning/read_with_argparse")],
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
