"""torchrun's own parser, and command lines that are easy to misread."""

import sys
from importlib.metadata import version

import pytest

from saferun.knowledge.torchrun_options import of_torch
from saferun.model import CommandLine, Option

NO_SCRIPT = "the following arguments are required: training_script, training_script_args"
# CPython's later argparse argv some refusals otherwise, and accepts what 3.10 and 3.11 refuse.
OLD_ARGPARSE = sys.version_info < (3, 12)
PET_ENVIRONMENTS = {
    "none": {},
    "values": {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "3", "PET_RDZV_ID": ""},
    "flags": {"PET_STANDALONE": "1", "PET_MODULE": "1", "PET_NO_PYTHON": "0", "PET_TEE": "3"},
}


def installed_options() -> tuple[Option, ...]:
    """The installed torch's options, which saferun asks it for where its table has them not."""
    return of_torch(version("torch")) or parsers_options()


def parsers_options() -> tuple[Option, ...]:
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    return tuple(
        Option(
            action.dest,
            tuple(action.option_strings),
            action.nargs == 0,
            "PET_" + action.dest.upper() if isinstance(action, (env, check_env)) else None,
        )
        for action in get_args_parser()._actions
        if action.option_strings
    )


class RefusedError(Exception):
    """The error message with which the real parser refuses a line."""


class RealParser:
    """torchrun's own parser, as the installed torch builds it with some PET_ variables."""

    def __init__(self, environ):
        run = pytest.importorskip("torch.distributed.run")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            self.parser = run.get_args_parser()
        self.parser.error = self._refuse
        for action in self.parser._actions:
            if action.dest == "numa_binding":
                action.choices = None  # they differ by version: left to torchrun
        self.parser.print_help = lambda: self._refuse("HELP")

    def _refuse(self, message):
        raise RefusedError(message)

    def __call__(self, argv):
        """Return the namespace as a dict, or the message as a string."""
        try:
            return vars(self.parser.parse_args(list(argv)))
        except RefusedError as refused:
            return str(refused)


def same_reading(line: CommandLine, outcome) -> bool:
    """Whether our reading of a line is the one that torchrun's parser has of it."""
    if isinstance(outcome, str):
        return (line.script, line.script_args) == (None, ()) and (
            "help" in line.given and (line.refusal is None or not OLD_ARGPARSE)
            if outcome == "HELP"
            else line.refusal == outcome or (not OLD_ARGPARSE and line.refusal is not None)
        )
    return (
        line.refusal is None
        and line.script == outcome["training_script"]
        and list(line.script_args) == outcome["training_script_args"]
    )


READINGS = {
    "nothing but a script": (["train.py"], "train.py", []),
    "dash and underscore": (["--nproc-per-node=2", "--nproc_per_node", "3", "t.py"], "t.py", []),
    "-m away from its module": (["-m", "--nnodes", "1", "pkg.mod", "-m"], "pkg.mod", ["-m"]),
    "-t3": (["-t3", "t.py"], "t.py", []),
    "-mt3 is -m -t 3": (["-mt3", "mod"], "mod", []),
    "unique abbreviations": (["--nn", "1", "--stand", "--nproc-=2", "t.py"], "t.py", []),
    "negative number as value": (["--node-rank", "-1", "t.py"], "t.py", []),
    "word with a blank as value": (["--rdzv-conf", "-a b", "t.py"], "t.py", []),
    "a lone dash as script": (["-", "x"], "-", ["x"]),
    "a script with a blank": (["-x script.sh", "x"], "-x script.sh", ["x"]),
    "-- before the script is swallowed": (["--", "t.py", "a"], "t.py", ["a"]),
    "a later -- is the script's": (["t.py", "a", "--", "b"], "t.py", ["a", "--", "b"]),
    "an option behind -- is the script": (["--", "--nnodes", "2"], "--nnodes", ["2"]),
    "torchrun's options behind the script": (
        ["t.py", "--nnodes=2", "--standal", "--nn", "-t3", "-mx", "-h"],
        "t.py",
        ["--nnodes=2", "--standal", "--nn", "-t3", "-mx", "-h"],
    ),
    "a command's name as script": (["plan", "--json"], "plan", ["--json"]),
    "unicode": (["--role", "größe", "träin.py", "--ü", "日本"], "träin.py", ["--ü", "日本"]),
}
REFUSALS = {
    "nothing": ([], NO_SCRIPT),
    "only options": (["--nnodes", "1"], NO_SCRIPT),
    "unknown options": (["--a", "-x", "--b=c", "t.py"], "unrecognized arguments: --a -x --b=c"),
    "an abbreviation of ours": (["--prof=h100", "t.py"], "unrecognized arguments: --prof=h100"),
    "ambiguous": (
        ["--nproc", "2", "t.py"],
        "ambiguous option: --nproc could match --nproc-per-node, --nproc_per_node",
    ),
    "our option as value": (
        ["--nnodes", "--dry-run", "t.py"],
        "argument --nnodes: expected one argument",
    ),
    "-- as value": (["-t", "--", "t.py"], "argument -t/--tee: expected one argument"),
    "flag with value": (
        ["--no-python=1", "t.py"],
        "argument --no-python/--no_python: ignored explicit argument '1'",
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
AMBIGUOUS_ARGS = {
    "with a value": (["t.py", "--run=3", "x"], ["--", "t.py", "--run=3", "x"]),
    "after options": (["-t", "3", "t.py", "--node", "1"], ["-t", "3", "--", "t.py", "--node", "1"]),
    "before a -- of the script's own": (
        ["t.py", "a", "--log", "--", "b"],
        ["--", "t.py", "a", "--log", "--", "b"],
    ),
    "behind a -- before the script": (["--", "t.py", "--log"], ["--", "t.py", "--log"]),
    "ours before": (["--profile", "x", "t.py", "--log"], ["--", "t.py", "--log"]),
}
