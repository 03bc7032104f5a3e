"""Pure: the lines of a log as values for the diagnosis."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of a log."""

    number: int  # counted from 1; approximate between head and tail of a long log
    rank: int | None  # rank that a prefix names
    text: str  # without prefixes, for the rules
    raw: str  # the printed line without colours, for people


class Log(NamedTuple):
    """The lines of a log that are kept."""

    lines: tuple[Line, ...] = ()
    line_count: int = 0
    whole: bool = True  # False if parts between head and tail were only counted
