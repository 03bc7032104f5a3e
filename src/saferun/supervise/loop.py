"""The loop of attempts under the locks: start, wait, diagnose, decide, start again or explain.

The code that decides is pure (planning/build.py, diagnosis/deciding/classify.py,
diagnosis/deciding/retry_policy.py); the code that acts is in gpu/lock/gpu_locks.py,
journal/writer.py and supervise/attempt/attempt_runner.py. An attempt has ended when none of its
processes lives, apart from what a successful job left on purpose.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from saferun.diagnosis.attempt_outcome import ASKED, FAILED, REPLACED, AttemptOutcome, Decision
from saferun.diagnosis.deciding import retry_policy
from saferun.diagnosis.silence import Longest
from saferun.errors import EXIT_UNAVAILABLE, OWN_FAULT, BusyError, SaferunError, own_fault
from saferun.gpu.lock.gpu_locks import Held
from saferun.journal import torchelastic_dirs
from saferun.journal.event_types import Preflight, Recovery, Recycled
from saferun.journal.writer import Journal
from saferun.model import Finding, LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.planning.view import announcement
from saferun.supervise import faults
from saferun.supervise.attempt.end_requests import (
    EndRequestedError,
    EndRequests,
    outlive_signals,
    restore_interrupts,
)
from saferun.supervise.attempt_end import INTERRUPTED, AttemptEnd
from saferun.supervise.changes.mitigations import RunMitigations
from saferun.supervise.changes.parts import RunParts
from saferun.supervise.changes.resumption import Resumption
from saferun.supervise.gpu_gate import GpuCare, take_locks
from saferun.supervise.left_trials import fail_left_over
from saferun.supervise.nodes.nodes import Agreed, Nodes
from saferun.supervise.one_attempt import Attempt, OfRun
from saferun.supervise.ready import own_files
from saferun.supervise.ready.keeper_pool import KeeperPool
from saferun.supervise.ready.next_attempt import NextAttempt
from saferun.supervise.records import record, report
from saferun.supervise.records.record import Record
from saferun.supervise.replace import become_job, check_size

Say = Callable[[str], None]


class RunEnd(NamedTuple):
    """How a run, or one of its workers, ended."""

    status: int  # exit status
    reason: str = ""  # one clause
    verdict: str = ""  # on its last attempt; "" if that succeeded or was asked to end
    by_interrupt: bool = False  # a SIGINT ended it
    asked: bool = False  # a signal from outside has ended it
    at_s: float = 0.0  # when, by time.monotonic(), which all processes share


def supervise(gathered: RunInputs, say: Say) -> int:
    """Run attempts until one succeeds or another would not help; return the exit status.

    Args:
        gathered: the inputs of every attempt's plan.
        say: function that takes lines for people.

    Returns:
        The exit status of the run.

    Raises:
        BusyError: another run has the GPUs.
        UnavailableError: the launcher cannot be started, or not with this environment.
        KeyboardInterrupt: a SIGINT ended the run; everything is closed.
    """
    if gathered.launcher is not None:
        restore_interrupts()
    outlive_signals()
    gathered, journal = record.begin(gathered, say)
    try:
        held = take_locks(gathered, say)
    except BusyError:
        journal.discard()
        raise
    with held:
        end = run(gathered, held, journal, say)
    if end.by_interrupt:
        raise KeyboardInterrupt  # a shell's loop continues after any end but one by SIGINT
    return end.status


def run(
    gathered: RunInputs, held: Held, journal: Journal, say: Say, *, worker: bool = False
) -> RunEnd:
    """Run attempts under held locks, with an open journal.

    Args:
        gathered: the inputs of every attempt's plan.
        held: the locks of the run.
        journal: the run's journal.
        say: function that takes lines for people.
        worker: this is one of several workers: others write to the same output, and the run has
            been announced.

    Raises:
        SaferunError: the launcher cannot be started, or not with this command line.
    """
    try:
        plan = gathered.plan()
        check_size(plan, gathered.environ)
    except SaferunError:
        journal.discard()
        raise
    care = GpuCare(gathered, plan, held, say)
    keepers = KeeperPool(held.descriptors(), shared=worker)
    try:
        keepers.start_keeper()
    except OSError as error:
        journal.discard()
        say(f"the job is not supervised, no process could be started for it: {error.strerror}")
        return RunEnd(become_job(gathered, plan, held, care))
    if not worker:
        say(announcement(plan))
    return _Run(
        gathered, plan, held, keepers, care, record.for_run(journal, gathered, plan, say), say
    ).go()


class _Run:
    """One run: its attempts so far, and the state that they share.

    Args:
        gathered: the inputs of every attempt's plan.
        first: the plan of attempt 1 without mitigations.
        held: the locks of the run.
        keepers: holds the keeper of the next attempt.
        care: tests and recovers the GPUs.
        run_record: the record of the run's events.
        say: function that takes lines for people.
    """

    def __init__(
        self,
        gathered: RunInputs,
        first: LaunchPlan,
        held: Held,
        keepers: KeeperPool,
        care: GpuCare,
        run_record: Record,
        say: Say,
    ) -> None:
        self._gathered = gathered
        self._held, self._keepers, self._care = held, keepers, care
        self._record, self._say = run_record, say
        self._began = time.monotonic()
        self._history: list[AttemptOutcome] = []
        self._mitigations = RunMitigations(gathered, first, run_record.path or "")
        self._resumption = Resumption(gathered, first, say)
        self._following = NextAttempt(
            gathered, first, keepers, lambda: self._planned(self._inputs_next()), say
        )
        self._parts = RunParts(gathered)
        self._nodes = self._all_nodes(first)
        self._requests = EndRequests()
        self._of_run = OfRun(
            history=self._history,
            record=run_record,
            keepers=keepers,
            following=self._following,
            longest=Longest(),
            saved_before=self._resumption.saved_before,
            say=say,
        )

    def _all_nodes(self, plan: LaunchPlan) -> Nodes:
        if self._gathered.launcher is None or plan.options.nodes == 1:
            return Nodes()

        from saferun.supervise.nodes.peer_nodes import PeerNodes  # few runs have several nodes

        return PeerNodes(self._gathered, self._resumption, self._record, self._say)

    # --- the run ---------------------------------------------------------------------------

    def go(self) -> RunEnd:
        """Run attempts one after the other; return how the run ended."""
        with self._requests:
            try:
                return self._attempts()
            except EndRequestedError as request:
                return self._asked_between(request.number)
            except Exception as error:
                self._record.end(None, f"{type(error).__name__}: {error}")
                raise
            finally:
                self._care.close()
                self._keepers.close()
                self._mitigations.close()
                self._nodes.close()
                self._record.close(self._requests.fd)

    def _attempts(self) -> RunEnd:
        """Run attempts until no other follows.

        Raises:
            EndRequestedError: a signal came between two attempts, or before the first one.
        """
        self._mitigations.put_in_force(self._gathered, self._say)
        delay_s = 0.0
        while True:
            with self._requests.raised():
                self._requests.check_last()
                time.sleep(delay_s)  # a signal that ends the run interrupts this
                test = self._test_gpus()
            if test:  # written at a time when no signal can keep the journal's thread busy
                self._record.journal.event(test)
            if test and not test.granted:
                return self._over(EXIT_UNAVAILABLE, "the GPUs failed the preflight test")
            attempt = self._begun()
            ended = attempt.run(self._environment(attempt.plan), self._requests.blocked)
            decision = self._decided(attempt, ended)
            self._recover(attempt, decision)
            if decision.action != retry_policy.AGAIN:
                own = ended.status(torchrun=self._gathered.launcher is not None)
                status = self._nodes.status(own)
                interrupted = ended.by_interrupt and status == INTERRUPTED
                return self._over(status, decision.reason, by_interrupt=interrupted)
            if decision.add:
                self._mitigations.add(decision.add, self._history[-1].kind)
            delay_s = decision.delay_s

    def _test_gpus(self) -> Preflight | None:
        """Have the GPUs tested if needed; during the test attempt 1's agent imports torch."""
        if not self._history and self._care.waits and not self._following.replaces:
            self._following.prepare(*self._planned(self._gathered))
        return self._care.tested(self._history[-1].kind if self._history else "")

    def _asked_between(self, number: int) -> RunEnd:
        """End the run because a signal asks for it between attempts."""
        lines = report.asked_lines(self._history, number, self._record.path)
        self._say("\n".join(lines))
        status = 128 + number
        return self._over(status, "asked to end", asked=True, by_interrupt=status == INTERRUPTED)

    def _over(
        self, status: int, reason: str, *, asked: bool = False, by_interrupt: bool = False
    ) -> RunEnd:
        at_s = time.monotonic()
        last = self._history[-1] if self._history else AttemptOutcome(0)
        failed = [one.lived_s for one in self._history if one.way in (FAILED, REPLACED)]
        advice = self._resumption.advice(failed)
        if advice:
            self._say(advice)
        if status and self._history:
            self._record.harmlessly(lambda: self._fail_left_trials(status))
        if self._history and last.way != ASKED:
            self._record.harmlessly(lambda: self._parts.keep(last.lived_s))
        asked = asked or last.way == ASKED
        self._record.end(status, reason, advice, asked=asked)
        verdict = last.diagnosis.verdict if last.way == FAILED else ""
        if verdict and self._gathered.identity.worker is None:
            self._record.harmlessly(lambda: record.leave_verdict(self._gathered.environ, verdict))
        return RunEnd(status, reason, verdict, by_interrupt, asked, at_s)

    def _fail_left_trials(self, status: int) -> None:
        """Mark trials of a study that still count as running as failed; most runs have none."""
        identity, launcher = self._gathered.identity, self._gathered.launcher
        plan, environ = self._planned(self._gathered)
        python = launcher.interpreter if launcher else plan.command[0]
        if identity.state is not None and python is not None:
            fail_left_over(identity.state, python, environ, status, self._say)

    # --- the plan of an attempt ------------------------------------------------------------

    def _begun(self) -> Attempt:
        """Return the next attempt: the same computation of a plan with what is known by now."""
        last = self._history[-1] if self._history else None
        gathered = self._nodes.begins(len(self._history) + 1, self._gathered)
        number = gathered.identity.attempt
        identity = gathered.identity._replace(
            site=own_files.files.hooks_site(gathered.identity.site, self._record.path),
            checkpoint=self._resumption.checkpoint(number, self._nodes.start),
            previous=None if last is None or last.way == REPLACED else last.exit_code,
        )
        self._gathered = gathered._replace(identity=identity)
        plan = self._mitigations.plan(self._gathered)
        attempt = Attempt(self._gathered, plan, self._mitigations.nccl_finding, self._of_run)
        self._record.attempt(number, plan, self._history, gathered.facts.torch)
        return attempt

    def _planned(self, gathered: RunInputs) -> tuple[LaunchPlan, dict[str, str]]:
        """Return the plan of an attempt with the mitigations in force, and its environment."""
        plan = self._mitigations.plan(gathered)
        return plan, self._environment(plan)

    def _environment(self, plan: LaunchPlan) -> dict[str, str]:
        own = plan.environment(self._gathered.environ)
        return {**own, **self._held.environ(), **self._nodes.environ(plan)}

    def _inputs_next(self) -> RunInputs:
        """Return the inputs for the plan of the attempt after the running one."""
        identity = self._gathered.identity
        return self._gathered._replace(identity=identity._replace(attempt=identity.attempt + 1))

    # --- its end ---------------------------------------------------------------------------

    def _decided(self, attempt: Attempt, ended: AttemptEnd) -> Decision:
        """Decide; a fault of saferun itself becomes one line, and the job's status stands."""
        try:
            return self._met(attempt, ended) or self._decide(attempt, ended)
        except Exception as error:
            import traceback  # only our own fault needs it

            what = "what the attempt's end means could not be decided"
            self._say(own_fault(what, error))
            self._record.fault(error, traceback=traceback.format_exc())
            return Decision(retry_policy.STOP, OWN_FAULT)

    def _met(self, attempt: Attempt, ended: AttemptEnd) -> Decision | None:
        """Adopt the nodes' agreement; return a decision if they began no attempt."""
        last = self._history[-1] if self._history else None
        decision = self._adopted(self._nodes.met(attempt, ended, last))
        if decision is not None and decision.action == retry_policy.STOP:
            self._report(ended, decision, ())
        return decision

    def _adopted(self, agreed: Agreed) -> Decision | None:
        if agreed.last is not None:
            self._history[-1] = agreed.last
        if agreed.mitigations is not None:
            self._mitigations.in_force = agreed.mitigations
        return agreed.decision

    def _decide(self, attempt: Attempt, ended: AttemptEnd) -> Decision:
        """Gather the facts, then decide; record and report the decision.

        The order counts: secrets are masked before anything is read, receipts are read before the
        diagnosis, and the nodes share their decisions before one is recorded.
        """
        plan, evidence = attempt.plan, attempt.evidence
        self._record.mask_ranks(attempt.identity)
        ended = self._record.clean(ended)
        found, ranks_ran = evidence.receipts(kept=self._record.journal.took_receipts())
        self._record.harmlessly(lambda: torchelastic_dirs.remove(found))
        self._mitigations.read_receipts(found, ranks_seen=ranks_ran)
        last = self._outcome(attempt, ended)
        attempt.beside.ended(ended)
        last = self._resumption.judged(last, plan, ended, attempt.beside.idle)
        self._history.append(last)
        ranks = {receipt.rank for receipt in found if receipt.rank is not None}
        self._record.harmlessly(lambda: self._parts.note(last, ranks))
        following = self._inputs_next()
        decision = retry_policy.decide(
            self._history,
            plan.settings,
            usable=lambda name, in_force: self._mitigations.usable(following, name, in_force),
            jitter=os.urandom(1)[0] / 255,  # `random` costs 5 ms to import
        )
        if decision.action == retry_policy.DONE:
            self._mitigations.learn(self._gathered, plan)
        if decision.action == retry_policy.AGAIN:
            self._mitigations.have_nccl_tested(following, last, evidence.nccl_tests)
        decision = self._adopted(self._nodes.shared(ended, last, decision)) or decision
        followed = decision._replace(delay_s=round(decision.delay_s, 3))
        self._record.ended(ended, last._replace(decision=followed))
        # A run that a signal ended may have had no time to leave receipts.
        ranks_ran = ranks_ran and not attempt.beside.told_of_hooks
        problems = () if ended.end_requested else evidence.hook_problems(found, ranks_ran=ranks_ran)
        self._report(ended, decision, problems)
        return decision

    def _outcome(self, attempt: Attempt, ended: AttemptEnd) -> AttemptOutcome:
        """Return the record of an attempt: if it failed, with its diagnosis."""
        evidence, beside = attempt.evidence, attempt.beside
        ended_s = time.monotonic() - self._began
        last = evidence.outcome(ended, ended_s, self._mitigations.in_force)
        if last.replaced_for:
            assert evidence.request is not None, "it has said why"
            self._record.journal.event(Recycled(last.number, *evidence.request))
        elif ended.exit_code:
            cause, stall = (
                hang and hang._replace(line=self._record.journal.masked(hang.line))
                for hang in (beside.cause, beside.stall)
            )
            last = evidence.diagnosed(last, ended, cause, self._nodes.lost(), stall)
        return last

    def _report(self, ended: AttemptEnd, decision: Decision, problems: tuple[str, ...]) -> None:
        added = [decision.add] if decision.add else []
        change = self._mitigations.describe([*added, *self._mitigations.beside])
        path, history, telling = self._record.path, self._history, self._nodes.telling(decision)
        host, diagnosis = telling.host, telling.diagnosis
        lines = report.attempt_lines(
            history, decision, change, path, host, diagnosis, resumes=self._resumption.is_set
        )
        report.show(self._say, ended, [*problems, *([] if telling.is_silent else lines)])

    def _recover(self, attempt: Attempt, decision: Decision) -> None:
        """Recover the GPUs as the failure requires.

        Raises:
            EndRequestedError: a signal came during the recovery.
        """
        last = self._history[-1] if self._history else None
        if last is None or last.way != FAILED or last.number != attempt.identity.attempt:
            return  # in the last case the nodes met, but began no attempt
        again, kind = decision.action == retry_policy.AGAIN, last.kind
        nothing: tuple[Finding, ...] = ()
        with self._requests.raised():
            found = faults.contained(
                lambda: self._care.recover(attempt.plan, kind, again=again),
                nothing,
                self._record.fault,
            )
        if found:
            self._record.journal.event(Recovery(found))
