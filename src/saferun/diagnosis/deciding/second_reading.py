"""Pure: what a log may say where its lines, read as they are, say nothing.

An exception within a line, behind words that are no prefix, is taken for one. Read so at first, a
log would be full of exceptions that somebody only mentions. And lines that a terminal has broken at
its edge are put together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from saferun.diagnosis.deciding.matches import is_information
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.tracebacks import GOES_ON

_CHARS = 8000  # of a line that are searched
_WITHIN = re.compile(
    r"(?<![\w.'\"/])(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception)(?=: \S|:$)"
)
# Words before an exception that is only mentioned.
_MENTIONS = (
    *("raise", "except", "catch", "catching", "caught", "if", "for", "a", "an", "the", "no", "on"),
    *("of", "from", "ignore", "ignored", "ignoring", "handle", "handled", "handling"),
)
_WARNS = re.compile(r"\bwarn", re.I)
_WORD_BROKEN = re.compile(r"[a-z\d][a-z\d]", re.I)
_FORM = dict.fromkeys(map(ord, "123456789"), "0")  # lines alike but for these are steps
_NARROW = 60  # characters: no terminal is narrower
_BROKEN = 2  # lines of one width, and none that is longer: a terminal's edge
_JOINED = 12  # lines, at most, of one that a terminal has broken


def lines(read: Sequence[Line]) -> list[Line]:
    """Return the lines whole, with the exceptions within them at their begin; [] where none is so.

    Args:
        read: the log's lines. As many are returned.
    """
    found = [_from_exception(line) for line in whole(read)]
    changed = any(new is not line for new, line in zip(found, read, strict=True))
    return found if changed else []


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


def is_broken(read: Sequence[Line], at: int) -> bool:
    """Return whether a terminal has broken a line at its edge, within a word."""
    if not 0 <= at < len(read) - 1 or len(read[at].raw) != _edge(read):
        return False
    return _WORD_BROKEN.match(read[at].text[-1:] + read[at + 1].text[:1]) is not None


def whole(read: Sequence[Line]) -> list[Line]:
    """Return the lines with those put together that a terminal has broken at its edge.

    The rest of such a line is left empty, so that all other lines keep their places.
    """
    joined = list(read)
    edge = _edge(read)
    for at in range(len(read) - 2, -1, -1) if edge else ():
        line, rest = read[at], joined[at + 1]
        # a blank at the edge was not copied
        alike = line.raw.translate(_FORM) == read[at + 1].raw.translate(_FORM)
        full = len(line.raw) in (edge, edge - 1) and not alike
        if full and rest.text and len(rest.raw) < _JOINED * edge:
            gap = " " * (edge - len(line.raw))
            joined[at] = line._replace(
                text=line.text + gap + rest.text, raw=line.raw + gap + rest.text
            )
            joined[at + 1] = rest._replace(text="")
    return joined


def _edge(read: Sequence[Line]) -> int:
    """Return the width at which a terminal has broken lines; 0 where it did not."""
    widths = Counter(len(line.raw) for line in read)
    width = max(widths, default=0)
    return width if width >= _NARROW and widths[width] >= _BROKEN else 0
