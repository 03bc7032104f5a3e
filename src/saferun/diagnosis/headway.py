"""Pure: how far a job had come when it failed, by the lines it printed."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from saferun.diagnosis.log_reader import Line

LONG_S = 1800.0
LONG_STEPS = 500
_LONG_EPOCHS = 10
_GONE_ON_STEPS = 3  # of a job that an exception did not end
_LINES = 200  # before the failure that are looked at
_RECENT_LINES = 20
_LINE_CHARS = 400  # the end of a line: where a bar shows its last state
_STEPS = re.compile(
    r"\b(?:step|iter|iteration|global_step|batch)s?[\s=:/\[\]]{1,4}(\d{1,9})\b", re.I
)
_EPOCHS = re.compile(
    r"\bepoch[\s=:#\[(]{1,4}(\d{1,5})\b|^\s{1,12}(\d{1,5})/\d{1,5}\s+[\d.]+G\s", re.I
)
_BAR = re.compile(r"\b(\d{1,9})/\d{1,9} \[\d")
_ELAPSED = re.compile(r"\[(?:(\d{1,3}):)?(\d{1,2}):(\d\d)<")
# A loss that is no number, or of ten thousands, turns into indices that no memory has.
_DIVERGED = re.compile(r"loss\w{0,20}['\"]?\s{0,3}[:=]\s{0,3}(?:-?nan\b|-?inf\b|\d{5,30}\b)", re.I)


class Step(NamedTuple):
    """One line of a job that goes on."""

    at: int  # index of the line
    rank: int | None
    number: int


def told(lines: Sequence[Line], start: int, end: int) -> list[Step]:
    """Return the steps, iterations and positions of progress bars that lines tell."""
    steps = []
    for at in range(start, end):
        text = lines[at].text[-_LINE_CHARS:]
        if found := _BAR.search(text) or _STEPS.search(text):
            steps.append(Step(at, lines[at].rank, int(found[1])))
    return steps


def went_on(steps: Sequence[Step], at: int, rank: int | None) -> bool:
    """Return whether a rank made enough steps after a line, each one further than the last."""
    count, reached = 0, -1
    for step in steps[bisect_left(steps, (at,)) :]:
        if step.rank == rank and step.number > reached:
            count, reached = count + 1, step.number
        if count == _GONE_ON_STEPS:
            return True
    return False


def is_long(before: Sequence[Line]) -> bool:
    """Return whether the last of these lines tell of many steps, epochs or minutes."""
    for line in before[-_LINES:]:
        text = line.text[-_LINE_CHARS:]
        if any(int(n) >= LONG_STEPS for n in _STEPS.findall(text)):
            return True
        if any(int(a or b) >= _LONG_EPOCHS for a, b in _EPOCHS.findall(text)):
            return True
        for hours, minutes, seconds in _ELAPSED.findall(text):
            if int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) >= LONG_S:
                return True
    return False


def diverged(before: Sequence[Line]) -> bool:
    """Return whether the last of these lines tell of a loss that has left all bounds."""
    return any(_DIVERGED.search(line.text[-_LINE_CHARS:]) for line in before[-_RECENT_LINES:])
