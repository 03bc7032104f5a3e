"""The checkpoint from which the next attempt resumes, and the work that a failure costs.

Only checkpoints that the run itself has written count: an older one may be from another training.
If Slurm requeued the job, an earlier run of the same job wrote them. A node that joins a run of
several nodes uses the checkpoints that the other nodes name, if it finds the same files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from saferun.base.durations import seconds
from saferun.diagnosis import work_lost
from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.work_lost import WorkLost
from saferun.errors import own_fault
from saferun.inject.node.node_agreement import AgreedStart, Offer, is_one
from saferun.journal import receipts
from saferun.model import Checkpoint, LaunchPlan
from saferun.planning import resume
from saferun.planning.inputs import RunInputs
from saferun.planning.torchrun.torchrun_args import ranks
from saferun.settings import ResumePolicy
from saferun.supervise import faults
from saferun.supervise.attempt_end import AttemptEnd
from saferun.system import checkpoints, disk_room
from saferun.system.checkpoints import Found, Stamp

T = TypeVar("T")

# Kinds of failure from a checkpoint that cannot be loaded.
_KINDS = ("checkpoint-corrupt", "checkpoint-mismatch", "state-dict-mismatch")
_MEASURED = 3  # checkpoints whose time to write is determined
_FULL = "disk-full"
_SHORTEST_S = 10.0  # between checkpoints; a person would not use a shorter interval
_OFFERED = 3  # checkpoints that a node names to the others


def requeued(gathered: RunInputs) -> bool:
    """Return whether Slurm has requeued this job (https://slurm.schedmd.com/sbatch.html)."""
    return gathered.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


class Resumption:
    """The checkpoints of one run.

    Args:
        gathered: the inputs of the run's plans.
        first: the plan of attempt 1.
        say: function that takes lines for people.
    """

    def __init__(self, gathered: RunInputs, first: LaunchPlan, say: Callable[[str], None]) -> None:
        self._gathered, self._first, self._say = gathered, first, say
        self._policy = first.settings.retry.resume
        self._requeued = requeued(gathered)
        self._pattern: str | None = None
        self._before: dict[str, Stamp] = {}  # path -> stamp of checkpoints that must not be used
        self._bad: dict[str, Stamp] = {}  # the same, whatever other nodes say
        # Nodes may meet several times before an attempt begins; each of these lines is printed
        # once.
        self._say_once = functools.cache(say)
        self._lost: list[WorkLost] = []
        self._furthest = -1  # step of the newest complete checkpoint so far
        self.offers: list[Offer] = []  # for the attempt of the last call of `checkpoint`
        if self._policy.checkpoints:
            self._harmlessly(self._begin)

    @property
    def is_set(self) -> bool:
        """Return whether a setting, or an argument as `--resume`, says how an attempt goes on."""
        words = self._gathered.request.line.script_args
        own = [word for word in words if "resume" in word.lower().partition("/")[0]]
        return bool(self._policy.checkpoints or self._first.settings.retry.resume_args or own)

    def _begin(self) -> None:
        args, environ = self._gathered.request.line.script_args, self._gathered.environ
        try:
            self._pattern = resume.pattern(self._policy, args, environ)
        except resume.UnknownError as error:
            self._say(f"retry.resume.checkpoints: {{{error}}} has no value here: nothing resumes")
        if self._pattern and not self._requeued:
            self._before = {one.checkpoint.path: one.stamp for one in self._find()}

    def checkpoint(self, number: int, agreed: AgreedStart | None = None) -> Checkpoint | None:
        """Return the checkpoint from which attempt `number` resumes, and print it.

        Args:
            number: the attempt's number.
            agreed: the decision of the run's nodes about it; None if there is none.
        """
        self.offers = []
        if self._pattern and (number > 1 or self._requeued):
            return self._harmlessly(lambda: self._announced(number, agreed))
        return None

    def _announced(self, number: int, agreed: AgreedStart | None) -> Checkpoint | None:
        if agreed is not None:
            self._adopt(agreed["offers"] or [])
        found = self._complete(1 if self._first.options.nodes == 1 else _OFFERED)
        self.offers = [_offer(one) for one in found]
        if agreed is not None:
            wanted = agreed["checkpoint"]
            ours = [one for one in found if is_one(_offer(one), wanted)]
            found = ours if ours or wanted is None else found
        if found:
            chosen = found[0].checkpoint
            self._furthest = max(self._furthest, chosen.step)
            step = f" (step {chosen.step})" if chosen.step >= 0 else ""
            self._say_once(f"attempt {number} goes on from {chosen.path}{step}{self._cost()}")
            return chosen
        if number > 1 and (agreed is None or agreed["checkpoint"] is None):
            self._say_once(
                f"attempt {number} starts as you wrote it: no complete checkpoint of this run is "
                f"at {self._pattern}"
            )
        return None

    def _adopt(self, offers: Sequence[Offer]) -> None:
        """Accept the other nodes' checkpoints as this run's if the files are here."""
        for one in self._find() if self._before else ():
            if any(is_one(_offer(one), offer, by_stamp=True) for offer in offers):
                self._before.pop(one.checkpoint.path, None)

    def _cost(self) -> str:
        if not self._lost or not (self._lost[-1].s or self._lost[-1].steps):
            return ""
        last = self._lost[-1]
        steps = f"{last.steps} steps, " if last.steps else ""  # a job may print few of its steps
        return f"; {steps}{seconds(last.s)} of work are done again"

    def judged(
        self,
        last: AttemptOutcome,
        plan: LaunchPlan,
        ended: AttemptEnd,
        idle: Sequence[tuple[float, float]] = (),
    ) -> AttemptOutcome:
        """Return an attempt with its checkpoints, and, if it failed, with what they allow.

        The record then has whether it came further than all earlier attempts, whether an older
        checkpoint is tried next, and whether a full disk has room again, for which this function
        waits.

        Args:
            last: the attempt.
            plan: the attempt's plan.
            ended: how the attempt ended.
            idle: when its ranks only waited, from and until, in seconds since the epoch.
        """
        if not self._pattern:
            return last
        return self._harmlessly(lambda: self._judged(last, plan, ended, idle)) or last

    def _judged(
        self,
        last: AttemptOutcome,
        plan: LaunchPlan,
        ended: AttemptEnd,
        idle: Sequence[tuple[float, float]],
    ) -> AttemptOutcome:
        found = [one.checkpoint for one in self._find()]
        last = last._replace(saved=work_lost.saved_in(ended.started_at, ended.lived_s, found))
        if not ended.exit_code:
            return last
        bad = plan.checkpoint if last.kind in _KINDS and last.first_step is None else None
        if bad is not None:
            now = {one.checkpoint.path: one.stamp for one in self._find()}
            self._before[bad.path] = now.get(bad.path, (0, 0))
        if last.no_number is not None:  # later checkpoints may have it in their weights
            later = [one for one in self._find() if one.checkpoint.at_s > last.no_number.good_at_s]
            self._bad.update({one.checkpoint.path: one.stamp for one in later})
        newest = next(iter(self._complete(1)), None)
        if bad is not None:
            older = "the one before is tried" if newest else "there is none before it"
            self._say(f"{bad.path} could not be loaded and is left as it is; {older}")
            return last._replace(falls_back=newest is not None)
        checkpoint = newest.checkpoint if newest else None
        gpus = len(plan.gpus.gpus)
        identity = self._gathered.identity
        left = receipts.read(identity.receipts, last.number)
        end = ended.started_at + ended.lived_s
        ready = min(end, max(ended.started_at, receipts.met_at(left) or 0.0))
        if not left and last.first_step is None and plan.launcher == "torchrun":
            ready = end  # no rank of it began to work
        lost = work_lost.lost(last.last_step, ready, end - ready, checkpoint, gpus, idle)
        self._lost.append(lost)
        if checkpoint is not None and self._is_further(checkpoint, plan.checkpoint):
            last = last._replace(progressed=True)
        if last.kind == _FULL and plan.options.nodes == 1:
            last = last._replace(has_room=self._gets_room(plan.settings.retry.backoff_s[1]))
        return last._replace(lost_work=lost)

    def _is_further(self, newest: Checkpoint, began: Checkpoint | None) -> bool:
        """Return whether an attempt saved beyond all earlier ones; it may print no steps.

        If names have no number, a newer file counts, if the attempt began from a checkpoint.
        """
        if newest.step < 0:
            return began is not None and newest.at_s > began.at_s
        before, self._furthest = self._furthest, max(self._furthest, newest.step)
        return newest.step > before

    def _gets_room(self, limit_s: float) -> bool:
        """Wait until the checkpoints' file system has room for another; False if it gets none.

        Args:
            limit_s: the longest wait in seconds. A signal that asks for the end ends the wait and
                the run.
        """
        folder = disk_room.folder_of(self._pattern or "")
        sizes = [found.stamp[1] for found in self._find()]
        if disk_room.has(folder, max(sizes, default=0)):
            return True
        self._say(f"no room for a checkpoint in {folder}: waiting for it, up to {seconds(limit_s)}")
        return disk_room.wait(folder, max(sizes, default=0), limit_s)

    def advice(self, lived_s: list[float]) -> str:
        """Return a line for people on how often the job should save; "" if unknown.

        Args:
            lived_s: how long each failed attempt lived, in seconds.
        """
        advice = self._harmlessly(lambda: self._advice(lived_s)) if self._pattern else None
        return advice or ""

    def _advice(self, lived_s: list[float]) -> str:
        if len(lived_s) < work_lost.ENOUGH:
            return ""
        written = self._find()
        environ = self._gathered.environ
        took = [
            checkpoints.write_time_s(one.checkpoint.path, environ) for one in written[:_MEASURED]
        ]
        times = [one.checkpoint.at_s for one in written]
        best = work_lost.better_interval_s(lived_s, [t for t in took if t], times)
        if best is None or best < _SHORTEST_S:
            return ""
        lost = seconds(sum(one.s for one in self._lost))
        return (
            f"{len(lived_s)} failures had {lost} of work done again; a checkpoint every "
            f"{seconds(best)} would lose the least (Young/Daly, from how long writing one takes)"
        )

    # --- what is on the disk ---------------------------------------------------------------------

    def _find(self) -> list[Found]:
        return checkpoints.find(self._pattern or "")

    def saved_before(self, at_s: float) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run that was written before a time.

        Args:
            at_s: seconds since the epoch.
        """
        found = self._harmlessly(lambda: self._complete(1, at_s)) if self._pattern else None
        return found[0].checkpoint if found else None

    def _complete(self, most: int, until_s: float = float("inf")) -> list[Found]:
        """Return this run's newest complete checkpoints; print which newer ones are incomplete."""
        skipped = (self._before.items() | self._bad.items()) if self._bad else self._before.items()
        written = [
            one
            for one in self._find()
            if (one.checkpoint.path, one.stamp) not in skipped and one.checkpoint.at_s <= until_s
        ]
        paths = [one.checkpoint.path for one in written]
        whole: list[Found] = []
        for found in written:
            if reason := self._problem(found.checkpoint, paths):
                self._say_once(f"{found.checkpoint.path} is skipped: {reason}")
            elif len(whole := [*whole, found]) == most:
                break
        return whole

    def _problem(self, checkpoint: Checkpoint, written: Sequence[str]) -> str:
        args, environ = self._gathered.request.line.script_args, self._gathered.environ
        try:
            resume.arguments(args, self._policy, checkpoint, environ)
        except resume.UnknownError as error:
            return f"{{{error}}} in retry.resume.args has no value"
        return checkpoints.problem(checkpoint.path, ranks(self._first), written)

    def _harmlessly(self, work: Callable[[], T]) -> T | None:
        what = "the checkpoints could not be looked at"
        return faults.contained(work, None, lambda error: self._say(own_fault(what, error)))


def _offer(found: Found) -> Offer:
    path, step, at_s = found.checkpoint
    return {"path": path, "step": step, "at_s": at_s, "stamp": list(found.stamp)}


def resumed_now(gathered: RunInputs, say: Callable[[str], None]) -> LaunchPlan | None:
    """Return the plan of a second attempt that would start now; None without `retry.resume`.

    Args:
        gathered: the inputs of plans.
        say: function that takes lines about skipped checkpoints.
    """
    plan = gathered.plan()
    if not plan.settings.retry.resume.checkpoints or plan.disabled:
        return None
    again = gathered._replace(environ={**gathered.environ, "SLURM_RESTART_COUNT": "1"})
    checkpoint = Resumption(again, plan, say).checkpoint(2)
    identity = gathered.identity._replace(attempt=2, checkpoint=checkpoint)
    return gathered._replace(identity=identity).plan()


def saved_since(
    policy: ResumePolicy,
    script_args: Sequence[str],
    environ: Mapping[str, str],
    cwd: str,
    began_s: float,
) -> Checkpoint | None:
    """Return the newest complete checkpoint that a run in another process has written.

    Args:
        policy: `retry.resume`.
        script_args: the script's arguments as the user wrote them.
        environ: the run's environment.
        cwd: the run's working directory.
        began_s: start of the run, in seconds since the epoch; older checkpoints are not the run's.
    """
    try:
        pattern = resume.pattern(policy, script_args, environ)
    except resume.UnknownError:
        return None
    found = checkpoints.find(os.path.join(cwd, os.path.expanduser(pattern or "")))
    written = [one.checkpoint for one in found if one.checkpoint.at_s >= began_s]
    paths = [one.path for one in written]
    return next((one for one in written if not checkpoints.problem(one.path, 1, paths)), None)


def first_plan(gathered: RunInputs, say: Callable[[str], None]) -> LaunchPlan:
    """Return the plan of a run with a single attempt, which resumes if Slurm has requeued it.

    Args:
        gathered: the inputs of plans.
        say: function that takes lines for people.
    """
    plan = gathered.plan()
    if not plan.settings.retry.resume.checkpoints or not requeued(gathered):
        return plan
    checkpoint = Resumption(gathered, plan, say).checkpoint(1)
    return gathered._replace(identity=gathered.identity._replace(checkpoint=checkpoint)).plan()
