"""Sample an attempt's steps over time, for the report of its run."""

from __future__ import annotations

import time

from saferun.journal.training_steps import Point, as_text, number
from saferun.supervise.beside import Beside, seldom_s
from saferun.supervise.watch.live_job import newest_step
from saferun.supervise.watch.running_job import RunningJob

_MOST = 240  # most points kept of an attempt; their distance grows with its length


class StepSamples(Beside):
    """The steps of one attempt over time, for the journal.

    Args:
        job: the attempt.
    """

    def __init__(self, job: RunningJob) -> None:
        self._job, self._began_s = job, time.monotonic()
        self._apart_s = 0.0  # least time between two points
        self._points: list[Point] = []

    def look(self) -> float:
        """Add a sample; return the seconds until the next."""
        if text := self.sample():
            self._job.record.journal.steps(self._job.number, text)
        return seldom_s(self._began_s)

    def sample(self) -> str:
        """Return all samples so far, for the journal; "" if there is no new step."""
        now = time.monotonic() - self._began_s
        last = self._points[-1] if self._points else Point(0.0, -1)
        step, loss, age_s = newest_step(self._job.ends()) or (-1, "", 0.0)
        newest = Point(max(0.0, now - age_s), step, number(loss))
        if newest.step <= last.step or newest.s < last.s + self._apart_s:
            return ""
        self._points.append(newest)
        if len(self._points) > _MOST:
            self._points = self._points[::2]
            self._apart_s = 2 * newest.s / _MOST
        return as_text(self._points)
