"""The watches of one attempt, as its plan asks for them."""

from __future__ import annotations

from saferun.supervise.beside import Beside
from saferun.supervise.watch.first_steps import FirstSteps
from saferun.supervise.watch.hang_watch import HangWatch
from saferun.supervise.watch.hooks_seen import HooksSeen
from saferun.supervise.watch.loss_watch import LossWatch
from saferun.supervise.watch.running_job import RunningJob
from saferun.supervise.watch.slow_watch import SlowWatch


def of_job(job: RunningJob) -> list[Beside]:
    """Return the watches of an attempt, which was just started."""
    policy = job.plan.settings.watch
    found: list[Beside] = [HooksSeen(job), FirstSteps(job)]
    if policy.mode != "off":
        hangs = HangWatch(job)
        found += [hangs, SlowWatch(job, hangs)]
    return [*found, LossWatch(job)] if policy.loss != "off" else found
