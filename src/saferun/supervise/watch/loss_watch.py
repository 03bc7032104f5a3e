"""Watch the loss that a job prints: a training whose loss is not a number trains nothing any more.

A loss of NaN stays NaN, and the job computes on: seen on a Friday evening, on Monday morning. Its
output is in the keeper's memory, or in the files that the job and its ranks write to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.evidence import Hang, NoNumber
from saferun.model import Checkpoint, LaunchPlan
from saferun.supervise.records.record import Record
from saferun.supervise.watch import live_output
from saferun.supervise.watch.first_steps import NEVER_S

if TYPE_CHECKING:  # only a job that runs needs it
    from saferun.diagnosis.losses import Losses

_EVERY_S = 2.0
KIND = "loss-not-finite"


class LossWatch:
    """Watches the loss of one attempt.

    Args:
        plan: the attempt's.
        history: the attempts before it.
        record: the run's journal.
        saved_before: returns the newest checkpoint of the run from before a time.
        say: takes lines for people.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        history: Sequence[AttemptOutcome],
        record: Record,
        saved_before: Callable[[float], Checkpoint | None],
        say: Callable[[str], None],
    ) -> None:
        self._ends = plan.settings.watch.loss == "end"
        self._again = any(one.no_number for one in history)
        self._record, self._saved_before, self._say = record, saved_before, say
        self._keeper = self._launcher = 0
        self._sizes: dict[live_output.FileId, int] = {}
        self._losses: Losses | None = None
        self._is_over = False
        self.cause: Hang | None = None

    def started(self, keeper: int, launcher: int) -> None:
        """Note which command runs, and what its files hold from before."""
        self._keeper, self._launcher = keeper, launcher
        self._sizes = live_output.sizes(launcher)

    def check_job(self) -> float | None:
        """Look at the job; return the seconds until the next look, None to end it. Never raises."""
        if self._is_over:
            return NEVER_S
        try:
            found = self._found(time.time())
            if found is not None:
                self._is_over = True
                self._report(found)
        except Exception as error:
            self._is_over = True
            self._record.fault(error)
        return None if self.cause else _EVERY_S

    def _found(self, now_s: float) -> NoNumber | None:
        if self._losses is None:
            from saferun.diagnosis import losses  # see the top

            self._losses = losses.Losses(now_s, has_numbers=self._again)
        ends = live_output.ends(self._keeper, self._launcher, self._sizes, _EVERY_S * 3)
        return self._losses.take(ends, now_s)

    def _report(self, found: NoNumber) -> None:
        from saferun.diagnosis.losses import sentence  # see the top

        line, saved = sentence(found), self._saved_before(found.good_at_s)
        before = f"; the newest checkpoint before that is {saved.path}" if saved else ""
        self._record.loss(found, f"{line}{before}", saved)
        if self._ends:
            self.cause = Hang(KIND, None, line, "the losses that the job prints", found)
        else:
            self._say(f"{line}{before} (`watch.loss: end` would end the attempt)")
