"""Pure: join lines that a terminal has broken at its edge."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from saferun.diagnosis.reading.log_lines import Line

_WORD_BROKEN = re.compile(r"[a-z\d][a-z\d]", re.I)
_FORM = dict.fromkeys(map(ord, "123456789"), "0")  # lines that differ only in these are steps
_NARROW = 60  # characters; no terminal is narrower
_BROKEN = 2  # number of lines with equal width, and none longer, that show a terminal's edge
_JOINED = 12  # most lines into which a terminal has broken one


def is_broken(lines: Sequence[Line], at: int) -> bool:
    """Return whether a terminal has broken a line at its edge, within a word."""
    if not 0 <= at < len(lines) - 1 or len(lines[at].raw) != _edge(lines):
        return False
    return _WORD_BROKEN.match(lines[at].text[-1:] + lines[at + 1].text[:1]) is not None


def whole(lines: Sequence[Line]) -> list[Line]:
    """Return the lines; those that a terminal has broken at its edge are joined.

    The lines that were joined to another one become empty, so that all others keep their places.
    """
    joined = list(lines)
    edge = _edge(lines)
    for at in range(len(lines) - 2, -1, -1) if edge else ():
        line, rest = lines[at], joined[at + 1]
        # A blank at the edge was not copied.
        alike = line.raw.translate(_FORM) == lines[at + 1].raw.translate(_FORM)
        full = len(line.raw) in (edge, edge - 1) and not alike
        if full and rest.text and len(rest.raw) < _JOINED * edge:
            gap = " " * (edge - len(line.raw))
            joined[at] = line._replace(
                text=line.text + gap + rest.text, raw=line.raw + gap + rest.text
            )
            joined[at + 1] = rest._replace(text="")
    return joined


def _edge(lines: Sequence[Line]) -> int:
    """Return the width at which a terminal has broken lines; 0 if it did not."""
    widths = Counter(len(line.raw) for line in lines)
    width = max(widths, default=0)
    return width if width >= _NARROW and widths[width] >= _BROKEN else 0
