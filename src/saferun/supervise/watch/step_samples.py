"""Sample an attempt's steps over time, for the report of its run."""

from __future__ import annotations

import time

from saferun.diagnosis.reading import progress
from saferun.journal.training_steps import Point, as_text, number
from saferun.supervise.watch import live_output

_MOST = 240  # most points kept of an attempt; their distance grows with its length


class StepSamples:
    """The steps of one attempt over time.

    Args:
        keeper: the pid of the attempt's keeper.
        launcher: the pid of the attempt's command.
        began_s: when the attempt started, on the monotonic clock.
    """

    def __init__(self, keeper: int, launcher: int, began_s: float) -> None:
        self._keeper, self._launcher, self._began_s = keeper, launcher, began_s
        self._apart_s = 0.0  # least time between two points
        self._points: list[Point] = []

    def sample(self) -> str:
        """Return all samples so far, for the journal; "" if there is no new step."""
        now = time.monotonic() - self._began_s
        last = self._points[-1] if self._points else Point(0.0, -1)
        found = [last]
        for data, age_s in live_output.ends(self._keeper, self._launcher):
            for step, loss in progress.reports(data)[-1:]:
                found.append(Point(max(0.0, now - age_s), step, number(loss)))
        newest = max(found, key=lambda point: point.step)
        if newest is last or newest.s < last.s + self._apart_s:
            return ""
        self._points.append(newest)
        if len(self._points) > _MOST:
            self._points = self._points[::2]
            self._apart_s = 2 * newest.s / _MOST
        return as_text(self._points)
