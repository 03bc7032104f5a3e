"""Watch the loss that a job prints: once it is not a number, the training is useless.

A loss of NaN stays NaN, and the job would compute on for a whole weekend. Its output is in the
keeper's memory, or in the files that the job and its ranks write to.
"""

from __future__ import annotations

import time

from saferun.diagnosis import losses
from saferun.diagnosis.evidence import Hang, NoNumber
from saferun.supervise.beside import NEVER_S, Beside
from saferun.supervise.watch.running_job import RunningJob

_EVERY_S = 2.0
KIND = "loss-not-finite"


class LossWatch(Beside):
    """Watch the loss of one attempt.

    Args:
        job: the attempt.
    """

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._sizes = job.sizes()  # sizes of its files before the attempt
        again = any(one.no_number for one in job.history)
        self._losses = losses.Losses(time.time(), has_numbers=again)

    def look(self) -> float:
        """Look at the job; return the seconds until the next look."""
        ends = self._job.ends(self._sizes)
        recent = [data for data, age_s in ends if age_s <= _EVERY_S * 3]
        found = self._losses.take(recent, time.time())
        if found is None:
            return _EVERY_S
        self._report(found)
        return NEVER_S

    def _report(self, found: NoNumber) -> None:
        line, saved = losses.sentence(found), self._job.saved_before(found.good_at_s)
        before = f"; the newest checkpoint before that is {saved.path}" if saved else ""
        self._job.record.loss(found, f"{line}{before}", saved)
        if self._job.plan.settings.watch.loss == "end":
            self.cause = Hang(KIND, None, line, "the losses that the job prints", found)
        else:
            self._job.say(f"{line}{before} (`watch.loss: end` would end the attempt)")
