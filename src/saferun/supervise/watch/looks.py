"""The watches of one attempt, each of which looks at the job in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.silence import Longest
from saferun.model import Checkpoint, LaunchPlan
from saferun.supervise.attempt.attempt_values import Ended
from saferun.supervise.records.record import Record
from saferun.supervise.watch.first_steps import FirstSteps
from saferun.supervise.watch.hang_watch import HangWatch
from saferun.supervise.watch.loss_watch import LossWatch
from saferun.supervise.watch.slow_watch import SlowWatch

# Each has `started`, `cause` and `check_job` (the seconds until the next, None to end the job).
Watch: TypeAlias = "HangWatch | FirstSteps | LossWatch | SlowWatch"


class Looks:
    """All watches of an attempt that its plan asks for.

    Args:
        plan: the attempt's.
        number: the attempt's.
        history: the attempts before it.
        receipts: the directory of the ranks' receipts; None where there is none.
        record: the run's journal.
        longest: silences of the run so far.
        saved_before: returns the newest checkpoint of the run from before a time.
        say: takes lines for people.
        environ: the user's.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        number: int,
        history: Sequence[AttemptOutcome],
        receipts: str | None,
        record: Record,
        longest: Longest,
        saved_before: Callable[[float], Checkpoint | None],
        say: Callable[[str], None],
        environ: Mapping[str, str],
    ) -> None:
        self._first_steps = FirstSteps(plan, number, say)
        self._hangs = self._slow = None
        watches: list[Watch] = [self._first_steps]
        if plan.settings.watch.mode != "off":
            hangs = self._hangs = HangWatch(plan, receipts, record, longest, say, environ)
            self._slow = SlowWatch(plan, receipts, record, lambda: hangs.is_silent, say, environ)
            watches += [hangs, self._slow]
        if plan.settings.watch.loss != "off":
            watches.append(LossWatch(plan, history, record, saved_before, say))
        self._next_s: dict[Watch, float] = dict.fromkeys(watches, 0.0)
        self.takes_questions = self._hangs is not None

    @property
    def cause(self) -> Hang | None:
        """Why the attempt was ended."""
        return next((watch.cause for watch in self._next_s if watch.cause), None)

    @property
    def stall(self) -> Hang | None:
        """The rank that others waited for as the attempt ended."""
        return self._hangs.stall if self._hangs else None

    def started(self, keeper: int, launcher: int) -> None:
        """Note which command runs."""
        for watch in self._next_s:
            watch.started(keeper, launcher)

    def ask(self) -> None:
        """Have the next look followed by a report of where the ranks are."""
        if self._hangs:
            self._hangs.ask()
            self._next_s[self._hangs] = 0.0

    def check_job(self) -> float | None:
        """Have those look whose time has come; return the seconds until the next, None to end."""
        now = time.monotonic()
        for watch, next_s in self._next_s.items():
            if now >= next_s:
                wait_s = watch.check_job()
                if wait_s is None:
                    return None
                self._next_s[watch] = now + wait_s
        return max(0.0, min(self._next_s.values()) - now)

    def ended(self, ended: Ended) -> None:
        """Look at the beginning of the output of an attempt that is over."""
        if self._slow:
            self._slow.ended()
        self._first_steps.ended(ended)
