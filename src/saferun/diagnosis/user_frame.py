"""Pure: the innermost frame of the user's own code in a log, above what libraries called."""

from __future__ import annotations

import re
from collections.abc import Iterable

from saferun.diagnosis.log_reader import Line

_FRAME = re.compile(
    r'File "(?P<path>[^"]{1,400})", line (?P<line>\d{1,9}),? in (?P<name>\S.{0,200}?)\s{0,8}$'
)
_BOXED = re.compile(r"(?P<path>/\S{1,400}\.py):(?P<line>\d{1,9}) in (?P<name>\S{1,200})\s{0,8}$")
# Code that is installed, the interpreter's own, a launcher's, and our hooks.
_OTHERS = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/bin/\w{1,40}$|saferun_inject|/saferun/inject/"
)
_FIRST, _LAST = "most recent call first", "most recent call last"


def innermost(lines: Iterable[Line]) -> str:
    """Return the innermost frame of the user's code in the last stack that has one.

    Returns:
        As `File "train.py", line 9, in step`; "" where no stack shows code of the user's.
    """
    found = ""
    upwards: dict[int | None, bool] = {}  # by rank: the innermost frame comes first, as in C
    taken: set[int | None] = set()
    for line in lines:
        text = line.text
        if _FIRST in text or _LAST in text:
            upwards[line.rank] = _FIRST in text
            taken.discard(line.rank)
        elif frame := _users(text):
            if not upwards.get(line.rank):
                found = frame
            elif line.rank not in taken:
                taken.add(line.rank)
                found = frame
    return found


def _users(text: str) -> str:
    """Return the frame that a line shows, "" where it is none or not of the user's code."""
    if 'File "' not in text and ".py:" not in text:
        return ""
    found = _FRAME.search(text) or _BOXED.search(text)
    if found is None or _OTHERS.search(found["path"]):
        return ""
    return f'File "{found["path"]}", line {found["line"]}, in {found["name"]}'
