"""Programs that tests write, and shell text: quoted in this one place.

Any path may hold blanks, letters that are not ASCII, "saferun", or be longer than the kernel takes
in a `#!` line (BINPRM_BUF_SIZE, 256 bytes; 128 before Linux 5.1).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

SAFERUN = (sys.executable, "-m", "saferun")

SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}  # what a shell on the way adds to an environment


def shell(*words: object) -> str:
    """Return words as text for a shell."""
    return shlex.join(map(str, words))


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
