"""Pure: the lines of a log, as the diagnosis reads them."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of a log."""

    number: int  # counted from 1; approximate between head and tail of a long log
    rank: int | None  # named by a prefix
    text: str  # without prefixes, for the rules
    raw: str  # the printed line without colours, for people


class Log(NamedTuple):
    """The lines that are kept of a log."""

    lines: tuple[Line, ...] = ()
    line_count: int = 0
    whole: bool = True  # False where parts between head and tail were only counted
