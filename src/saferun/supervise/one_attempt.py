"""One attempt: its plan, what is known of it, and what works beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.silence import Longest
from saferun.model import Checkpoint, LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.supervise.attempt.attempt_evidence import AttemptEvidence
from saferun.supervise.attempt.attempt_runner import run_attempt
from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer
from saferun.supervise.attempt.end_requests import answer
from saferun.supervise.attempt_end import AttemptEnd, grace_s
from saferun.supervise.beside import LOAD_S, PREPARE_S, Beside, Looks, seldom_s
from saferun.supervise.ready import own_files
from saferun.supervise.ready.keeper_pool import KeeperPool
from saferun.supervise.ready.next_attempt import NextAttempt
from saferun.supervise.records.record import Record


class OfRun(NamedTuple):
    """What the attempts of a run share."""

    history: Sequence[AttemptOutcome]  # those that have ended
    record: Record
    keepers: KeeperPool
    following: NextAttempt
    longest: Longest  # longest silences of the run so far
    saved_before: Callable[[float], Checkpoint | None]  # the newest checkpoint from before a time
    say: Callable[[str], None]


class Attempt(Observer):
    """An attempt of a run: it observes its own processes.

    Args:
        gathered: the run's inputs; the identity names the attempt.
        plan: the attempt's plan.
        nccl_finding: the finding of NCCL's tests in an earlier attempt; "" for none.
        of_run: what it shares with the run's other attempts.
    """

    def __init__(
        self, gathered: RunInputs, plan: LaunchPlan, nccl_finding: str, of_run: OfRun
    ) -> None:
        self.plan = plan
        self.identity = gathered.identity
        self.evidence = AttemptEvidence(gathered, plan, nccl_finding)
        self.beside = Looks(of_run.record.fault)
        self._environ, self._run = gathered.environ, of_run

    def run(self, environ: Mapping[str, str], unblocked: frozenset[int]) -> AttemptEnd:
        """Run it until nothing of it lives but what a successful job left on purpose.

        Args:
            environ: its whole environment.
            unblocked: signals that this process has blocked only for itself.
        """
        plan = self.plan
        spec = AttemptSpec(
            plan.command,
            environ,
            launcher=plan.launcher,
            no_python=plan.options.no_python,
            grace_s=grace_s(plan),
            receipts=self.identity.receipts,
            handled=plan.options.handled_signals,
            limits=plan.limits,
            unblocked=unblocked,
        )
        self._run.following.begins(self.identity.attempt, plan, environ)
        return run_attempt(spec, self, self._run.keepers.take())

    # --- what run_attempt calls ------------------------------------------------------------

    def ordered(self) -> None:
        """Hold our own files while the keeper starts the job."""
        self._run.record.harmlessly(own_files.hold)

    def started(self, keeper: int, launcher: int) -> None:
        """Begin to look at the job.

        Args:
            keeper: the pid of its keeper.
            launcher: the pid of its first process.
        """
        record = self._run.record
        record.harmlessly(lambda: self.evidence.started(launcher))
        following = self._run.following
        self.beside.add(own_files.files, after_s=LOAD_S)
        self.beside.add(following, after_s=LOAD_S if following.replaces else PREPARE_S)
        self.beside.add(_Alive(record), self.evidence, after_s=PREPARE_S)
        record.harmlessly(lambda: self._watch(keeper, launcher))
        record.harmlessly(lambda: record.started(keeper, launcher))

    def _watch(self, keeper: int, launcher: int) -> None:
        """Begin to watch the ranks; the modules are imported now, while the job starts."""
        from saferun.supervise.watch import watches
        from saferun.supervise.watch.running_job import RunningJob
        from saferun.supervise.watch.step_samples import StepSamples

        job = RunningJob(
            plan=self.plan,
            number=self.identity.attempt,
            history=self._run.history,
            receipts=self.identity.receipts,
            record=self._run.record,
            longest=self._run.longest,
            saved_before=self._run.saved_before,
            say=self._run.say,
            environ=self._environ,
            keeper=keeper,
            launcher=launcher,
        )
        self.beside.add(StepSamples(job), after_s=PREPARE_S)
        self.beside.add(*watches.of_job(job))

    def cold(self, reason: str) -> None:
        """Note why its first process was not warm."""
        self._run.following.was_cold(reason)

    def look(self) -> float:
        """Let what works beside it look at it."""
        next_s, self.cause = self.beside.look(), self.beside.cause
        return next_s

    def asked(self) -> None:
        """A person asks where its ranks are: what works beside it looks at once."""
        self.beside.asked()

    def interrupted(self, left_s: float | None) -> None:
        """Answer a Ctrl-C."""
        self._run.say(answer(left_s))

    def spared(self) -> Iterable[int]:
        """Return the pids of our children that are no part of it."""
        return (*self._run.keepers.pids(), *self._run.record.helpers())


class _Alive(Beside):
    """Notes in the journal that the run lives."""

    def __init__(self, record: Record) -> None:
        self._record, self._began_s = record, time.monotonic()

    def look(self) -> float:
        self._record.journal.alive()
        return seldom_s(self._began_s)
