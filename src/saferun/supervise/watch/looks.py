"""The watches of one attempt, each with its own interval between looks."""

from __future__ import annotations

import time
from typing import TypeAlias

from saferun.diagnosis.evidence import Hang
from saferun.supervise.attempt.attempt_values import Ended
from saferun.supervise.watch.first_steps import FirstSteps
from saferun.supervise.watch.hang_watch import HangWatch
from saferun.supervise.watch.hooks_seen import HooksSeen
from saferun.supervise.watch.loss_watch import LossWatch
from saferun.supervise.watch.running_job import NEVER_S, RunningJob
from saferun.supervise.watch.slow_watch import SlowWatch

# Each has `check_job`, which returns the seconds until the next look, and `cause`, which ends the
# job.
Watch: TypeAlias = "HangWatch | FirstSteps | HooksSeen | LossWatch | SlowWatch"
_AFTER_FAULT_S = 10.0


class Looks:
    """All watches that an attempt's plan asks for.

    Args:
        job: the attempt, which was just started.
    """

    def __init__(self, job: RunningJob) -> None:
        self._record = job.record
        policy = job.plan.settings.watch
        self._hooks = HooksSeen(job)
        self._first_steps = FirstSteps(job)
        self._hangs = HangWatch(job) if policy.mode != "off" else None
        self._slow = SlowWatch(job, self._hangs) if self._hangs else None
        loss = LossWatch(job) if policy.loss != "off" else None
        found = (self._hooks, self._first_steps, self._hangs, self._slow, loss)
        self._next_s: dict[Watch, float] = {watch: 0.0 for watch in found if watch}

    @property
    def cause(self) -> Hang | None:
        """Return why the attempt was ended."""
        return next((watch.cause for watch in self._next_s if watch.cause), None)

    @property
    def stall(self) -> Hang | None:
        """Return the rank that others waited for when the attempt ended."""
        return self._hangs.stall if self._hangs else None

    @property
    def told_of_hooks(self) -> bool:
        """Return whether the user knows already that hooks do not run in some ranks."""
        return self._hooks.told

    @property
    def idle(self) -> tuple[tuple[float, float], ...]:
        """Return when all ranks only waited, from and until, in seconds since the epoch."""
        return self._hangs.idle if self._hangs else ()

    def ask(self) -> None:
        """Request a report of where the ranks are at the next look."""
        if self._hangs:
            self._hangs.is_wanted = True
            self._next_s[self._hangs] = 0.0

    def check_job(self) -> float | None:
        """Run the watches that are due; return the seconds until the next, None to end the job.

        A fault of saferun itself goes only to the journal.
        """
        now = time.monotonic()
        for watch, next_s in self._next_s.items():
            if now >= next_s:
                try:
                    self._next_s[watch] = now + watch.check_job()
                except Exception as error:
                    self._record.fault(error)
                    # After a fault only the watch for hangs tries again; any other watch would ask
                    # ranks again.
                    pause_s = _AFTER_FAULT_S if watch is self._hangs else NEVER_S
                    self._next_s[watch] = now + pause_s
                if watch.cause:
                    return None
        return max(0.0, min(self._next_s.values()) - now)

    def ended(self, ended: Ended) -> None:
        """Examine the beginning of an ended attempt's output."""
        if self._slow:
            self._slow.ended()
        self._first_steps.ended(ended)
