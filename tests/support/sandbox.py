"""What tests start processes in and with: a clean environment, programs, quoted shell text.

Any path may hold blanks, letters that are not ASCII, "saferun", or be longer than the kernel takes
in a `#!` line (BINPRM_BUF_SIZE, 256 bytes; 128 before Linux 5.1).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# All that a shell may hand on to what tests start. The rest of it would change what they see: a
# Python's, conda's or a module's settings, a job of Slurm, Kubernetes or torchrun, a CI, a terminal
# of a width, XDG's places, what NCCL, CUDA and torch read.
_HANDED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|TERM"
    r"|(?i:(?:https?|no|all)_proxy)|(?:PIP|UV|SSL|REQUESTS|CURL|PYENV|NIX)_\w+"  # to reach an index
    r"|CC|CXX|CUDA_HOME|CUDA_PATH"  # where a machine has its compilers
    r"|PYTEST_\w+|SAFERUN_(?:CORPUS|TEST_\w+)|TEST_TENSORFLOW|OUT",  # of the tests themselves
)
OWN_GPUS = "PYTEST_CUDA_VISIBLE_DEVICES"

SAFERUN = (sys.executable, "-m", "saferun")

SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}  # what a shell on the way adds to an environment


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of a shell's environment no test has to fear.

    The GPUs that it may use have another name in it: only tests of real ones ask.
    """
    kept = {name: value for name, value in environ.items() if _HANDED_ON.fullmatch(name)}
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return kept if visible is None else {**kept, OWN_GPUS: visible}


def shell(*words: object) -> str:
    """Return words as text for a shell."""
    return shlex.join(map(str, words))


def output(*words: object, **options: Any) -> str:
    """Run a command that succeeds; return what it printed."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def own_lines(text: str) -> list[str]:
    """Return what saferun wrote of a stream; its name alone is in paths, too."""
    return [line for line in text.splitlines() if line.startswith("saferun: ")]


def in_ascii(path: object) -> str:
    """Return a path as faulthandler writes it."""
    return str(path).encode("ascii", "backslashreplace").decode()


def frame(path: object, place: str) -> str:
    """Return a line of faulthandler's."""
    return f'File "{in_ascii(path)}", {place}'


def unwrapped(text: str) -> str:
    """Return what was wrapped for a terminal with single blanks: paths decide where lines break."""
    return " ".join(text.replace("\\\n", " ").split())


def executable(path: Path, text: str) -> Path:
    """Write a program; its text begins with the line of an interpreter that is where it says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def python_program(source: str, *flags: str, python: str | Path = sys.executable) -> str:
    """Return the text of a program of Python, as pip writes one below a path with blanks.

    The shell executes the second line; to Python it is a part of the first string.
    """
    # A docstring becomes one string with ours: only one may stand before a future import.
    joined = " \\\n" if source.startswith(('"""', "'''")) else "\n"
    words = shell(python, *flags)
    return f"#!/bin/sh\n'''exec' {words} \"$0\" \"$@\"\n' '''{joined}{source}"


def shell_program(*words: object, before: str = "") -> str:
    """Return the text of a program that is some words, with what it is given added.

    Args:
        before: lines of sh that it executes first.
    """
    return f'#!/bin/sh\n{before}\nexec {shell(*words)} "$@"\n'
