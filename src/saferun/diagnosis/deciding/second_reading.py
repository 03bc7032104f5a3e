"""Pure: a second reading of a log whose lines, read as they are, tell nothing.

An exception in the middle of a line, after words that are no known prefix, then counts. In a first
reading, that would find many exceptions that are only mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.deciding.matches import is_information
from saferun.diagnosis.reading import broken_lines
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.tracebacks import GOES_ON

_CHARS = 8000  # characters of a line that are searched
_WITHIN = re.compile(
    r"(?<![\w.'\"/])(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception)(?=: \S|:$)"
)
# Words that stand before an exception that is only mentioned.
_MENTIONS = (
    *("raise", "except", "catch", "catching", "caught", "if", "for", "a", "an", "the", "no", "on"),
    *("of", "from", "ignore", "ignored", "ignoring", "handle", "handled", "handling"),
)
_WARNS = re.compile(r"\bwarn", re.I)


def lines(read: Sequence[Line]) -> list[Line]:
    """Return as many lines, of which one with an exception begins with it; [] if none changes.

    Lines that a terminal has broken are joined.
    """
    found = [_from_exception(line) for line in broken_lines.whole(read)]
    return found if any(new is not line for new, line in zip(found, read, strict=True)) else []


def is_cut(best: Candidate | None) -> bool:
    """Return whether the cause is an unknown exception in a line that a terminal has broken."""
    if best is None or not (best.generic and best.in_log):
        return False
    return broken_lines.is_broken(best.source.lines, best.at)


def _from_exception(line: Line) -> Line:
    text = line.text[:_CHARS]
    if "Error:" not in text and "Exception:" not in text:
        return line
    if is_information(line) or GOES_ON.search(text.lower()):
        return line
    for found in reversed(list(_WITHIN.finditer(text))):
        before = text[: found.start()]
        word = before.lower().split()[-1:]
        mentioned = bool(word) and word[0] in _MENTIONS
        if before and not mentioned and not _WARNS.search(before):
            return line._replace(text=line.text[found.start() :])
    return line
