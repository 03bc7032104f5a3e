"""The training steps of an attempt over time: what it printed, and when.

While an attempt runs, its supervisor samples the steps in the output
(supervise/watch/step_samples.py). A tail of the output has more steps, but no times. Steps between
two known times are assumed to be equally long.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from saferun.base import files, untrusted
from saferun.diagnosis.reading import progress
from saferun.journal.run_directory import STEPS_FILE

_SHOWN = 160  # most points of an attempt


@dataclass(frozen=True, slots=True)
class Point:
    """A step, and when it appeared in the output."""

    s: float  # seconds since the start of the attempt
    step: int
    loss: float | None = None  # None if the line has none, or one that is not a number


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one attempt."""

    began: int | None = None  # number of steps done before its first one; None: unknown
    last: int | None = None  # the last step that it printed
    points: tuple[Point, ...] = ()  # with increasing times and steps


def as_text(points: Sequence[Point]) -> str:
    """Return the content of STEPS_FILE: a line `[seconds, step, loss]` for each point."""
    return "".join(f"{json.dumps([round(p.s, 1), p.step, p.loss])}\n" for p in points)


def read(run_path: str, number: int) -> tuple[Point, ...]:
    """Return the samples of an attempt's supervisor.

    Args:
        run_path: the run's directory, or the worker's.
        number: the attempt's number.
    """
    found: list[Point] = []
    for line in files.read(f"{run_path}/{STEPS_FILE.format(number)}", 1 << 20).split(b"\n"):
        row = untrusted.value(line)
        if not isinstance(row, list) or len(row) != 3:
            continue
        s, step, loss = untrusted.number(row[0]), untrusted.count(row[1]), row[2]
        if s is None or step is None:
            continue
        if not found or (s >= found[-1].s and step > found[-1].step):
            found.append(Point(s, step, _finite(loss)))
    return tuple(found)


def _finite(loss: object) -> float | None:
    return float(loss) if untrusted.is_number(loss) and math.isfinite(loss) else None


def steps(
    noted: Sequence[Point],
    tails: Sequence[bytes],
    first: int | None,
    ready_s: float,
    end_s: float,
    saved: Sequence[Point] = (),
) -> Steps:
    """Return the steps of an attempt.

    Args:
        noted: its supervisor's samples.
        tails: the ends of its output streams.
        first: the first step in its output; None if unknown.
        ready_s: when its work began, in seconds since its start.
        end_s: when it ended, or the last time at which it is known to have run.
        saved: its checkpoints, which show when it had done their steps.
    """
    told = max((progress.reports(data) for data in tails), key=lambda r: r[-1:], default=[])
    last = max([step for step, _ in told[-1:]] + [point.step for point in noted[-1:]], default=None)
    if last is None:
        return Steps(None if first is None else max(0, first - 1))
    lowest = min([step for step, _ in told[:1]] + [point.step for point in noted[:1]])
    if first is None or first > lowest:
        first = lowest
    apart = told[1][0] - told[0][0] if len(told) > 1 else 1
    began = max(0, first - apart)
    anchors = [Point(ready_s, began)] if began < first else []
    timed = _with_saved(noted, [p for p in saved if first <= p.step <= last])
    anchors += [p for p in timed if ready_s <= p.s <= end_s and p.step > (began if anchors else -1)]
    if not anchors or last > anchors[-1].step:
        anchors.append(Point(end_s, last))
    known = {step for step, _ in told}
    between = [Point(_time(anchors, step), step, number(loss)) for step, loss in told]
    points = sorted([*between, *(p for p in anchors if p.step not in known)], key=lambda p: p.step)
    return Steps(began, last, _thinned(points))


def _with_saved(noted: Sequence[Point], saved: Sequence[Point]) -> list[Point]:
    """Return both, except checkpoints that do not fit: the name may count something else."""
    timed = list(noted)
    for point in saved:
        at = bisect_left([one.step for one in timed], point.step)
        fits = at == 0 or timed[at - 1].s <= point.s
        if at < len(timed):
            fits = fits and timed[at].step > point.step and point.s <= timed[at].s
        if fits:
            timed.insert(at, point)
    return timed


def number(loss: str) -> float | None:
    """Return a loss from progress.reports as a number; None if there is none or it is not one."""
    return _finite(float(loss)) if loss else None


def reached_s(found: Steps, step: int) -> float | None:
    """Return when an attempt had done so many steps, in seconds since its start; None: never."""
    points = found.points
    return _time(points, step) if points and points[0].step <= step <= points[-1].step else None


def _time(points: Sequence[Point], step: int) -> float:
    at = bisect_left([point.step for point in points], step)
    if at == len(points):
        return points[-1].s
    after, before = points[at], points[max(0, at - 1)]
    if after.step == before.step:
        return after.s
    return before.s + (after.s - before.s) * (step - before.step) / (after.step - before.step)


def _thinned(points: list[Point]) -> tuple[Point, ...]:
    every = -(-len(points) // _SHOWN)
    kept = points[::every] if every else []
    return tuple(kept if not points or kept[-1] == points[-1] else [*kept, points[-1]])
