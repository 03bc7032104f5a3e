"""Pure: the part of an attempt's tail that a person reads, with the line that decided marked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from saferun.diagnosis.reading import log_reader
from saferun.diagnosis.reading.log_lines import Line
from saferun.system.printable import shortened

_BEFORE, _AFTER, _END = 24, 8, 16  # lines around the deciding one, and at the end
_LINE_CHARS = 400
_LEAST = 12  # characters of a deciding line that are looked for inside of others


class Row(NamedTuple):
    """One line of a tail."""

    text: str
    decides: bool
    skipped: int  # lines left out before it


class Excerpt(NamedTuple):
    """Some lines of one stream of an attempt."""

    stream: str  # "stdout", "stderr", "output" where there is one file
    rows: tuple[Row, ...]
    lines: int  # how many the whole tail has


def excerpt(stream: str, data: bytes, line: str) -> Excerpt:
    """Return the lines around the one that decided, and the last ones.

    Args:
        stream: its name.
        data: its end, as the journal keeps it.
        line: the one that decided; "" where none did.
    """
    lines = [one for one in log_reader.read((data,)).lines if one.raw.strip()]
    at, count = _deciding(lines, line), len(lines)
    shown = set(range(max(0, count - (_END if at is not None else _BEFORE + _AFTER)), count))
    if at is not None:
        shown |= set(range(max(0, at - _BEFORE), min(count, at + _AFTER + 1)))
    rows, last = [], -1
    for index in sorted(shown):
        rows.append(Row(shortened(lines[index].raw, _LINE_CHARS), index == at, index - last - 1))
        last = index
    return Excerpt(stream, tuple(rows), count)


def _deciding(lines: Sequence[Line], line: str) -> int | None:
    """Return the index of the line that decided: whole, else without prefixes, else inside."""
    wanted = line.strip()
    bare = log_reader.strip_prefixes(wanted)[1].strip()
    if not bare:
        return None
    ways = (
        (at for at, one in enumerate(lines) if one.raw.strip() == wanted),
        (at for at, one in enumerate(lines) if one.text.strip() == bare),
        (at for at, one in enumerate(lines) if len(bare) >= _LEAST and bare in one.raw),
    )
    return next(itertools.chain(*ways), None)
