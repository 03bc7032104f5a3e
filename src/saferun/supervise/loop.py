"""The loop of attempts under the locks: start, wait, diagnose, decide, start again or explain.

The code that decides is pure (planning/build.py, diagnosis/deciding/classify.py,
diagnosis/deciding/retry_policy.py); the code that acts is in gpu/lock/gpu_locks.py,
journal/writer.py and attempt/attempt_runner.py. An attempt has ended when none of its processes
lives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from saferun.diagnosis.attempt_outcome import (
    ASKED,
    FAILED,
    REPLACED,
    AttemptOutcome,
    Decision,
)
from saferun.diagnosis.deciding import retry_policy
from saferun.diagnosis.silence import Longest
from saferun.errors import EXIT_UNAVAILABLE, BusyError, SaferunError
from saferun.gpu.lock.gpu_locks import Held
from saferun.journal import torchelastic_dirs
from saferun.journal.event_types import Preflight, Recovery, Recycled
from saferun.journal.writer import Journal
from saferun.model import Finding, LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.planning.view import announcement
from saferun.supervise.attempt.attempt_runner import run_attempt
from saferun.supervise.attempt.attempt_values import AttemptSpec, Ended, Observer
from saferun.supervise.attempt.attempt_watch import (
    AttemptWatch,
    end_requested,
    ended_status,
    grace_s,
)
from saferun.supervise.attempt.end_requests import (
    INTERRUPTED,
    EndRequestedError,
    EndRequests,
    answer,
    outlive_signals,
    restore_interrupts,
)
from saferun.supervise.changes.mitigations import RunMitigations
from saferun.supervise.changes.parts import RunParts
from saferun.supervise.changes.resumption import Resumption
from saferun.supervise.gpu_gate import GpuCare, take_locks
from saferun.supervise.left_trials import fail_left_over
from saferun.supervise.ready import own_files, warm_start
from saferun.supervise.ready.keeper_pool import KeeperPool
from saferun.supervise.ready.rank_imports import RankImports
from saferun.supervise.records import record, report
from saferun.supervise.records.record import Record
from saferun.supervise.replace import become_job, check_size
from saferun.system.descriptors import plug_closed_descriptors

if TYPE_CHECKING:  # the first is for several nodes, the others are imported during an attempt
    from saferun.supervise.nodes.peer_nodes import PeerNodes
    from saferun.supervise.watch.looks import Looks
    from saferun.supervise.watch.step_samples import StepSamples

LOAD_S = 0.5  # after the start, which imports for the end must not delay
PREPARE_S = 5.0  # after the start: ranks are up, and the next attempt is prepared
ALIVE_S = 30.0  # between two notes in the journal that the run lives; shorter at first

Say = Callable[[str], None]


class RunEnd(NamedTuple):
    """How a run, or one of its workers, ended."""

    status: int  # exit status
    reason: str = ""  # one clause
    verdict: str = ""  # on its last attempt; "" if that succeeded or was asked to end
    by_interrupt: bool = False  # a SIGINT ended it
    asked: bool = False  # a signal from outside has ended it


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
    plug_closed_descriptors()  # otherwise the journal's descriptor would become the job's output
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
        self._is_warm = first.settings.start.ranks == "warm"
        self._imports = RankImports(first, gathered) if self._is_warm else None
        self._cold: set[str] = set()  # reasons why replacing processes were not warm
        self._stays_cold = False
        self._parts = RunParts(gathered)
        self._nodes = self._other_nodes(first)
        # The next attributes belong to the running attempt.
        self._watch: AttemptWatch
        self._looks: Looks | None = None
        self._longest = Longest()  # of the whole run
        self._steps: StepSamples | None = None
        self._began_s = 0.0
        self._requests = EndRequests()

    def _other_nodes(self, plan: LaunchPlan) -> PeerNodes | None:
        if self._gathered.launcher is None or plan.options.nodes == 1:
            return None

        from saferun.supervise.nodes.peer_nodes import PeerNodes  # few runs have several nodes

        return PeerNodes(
            self._gathered,
            self._history,
            self._mitigations,
            self._resumption,
            self._record,
            self._say,
        )

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
                if self._nodes:
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
            plan = self._begin_attempt()
            ended = self._attempt(plan)
            decision = self._decided(plan, ended)
            self._recover(plan, decision)
            if decision.action != retry_policy.AGAIN:
                status = ended_status(ended, torchrun=self._gathered.launcher is not None)
                if self._nodes and self._nodes.status is not None:
                    status = self._nodes.status
                interrupted = ended.by_interrupt and status == INTERRUPTED
                return self._over(status, decision.reason, by_interrupt=interrupted)
            if decision.add:
                self._mitigations.add(decision.add, self._history[-1].kind)
            delay_s = decision.delay_s

    def _asked_between(self, number: int) -> RunEnd:
        """End the run because a signal asks for it between attempts."""
        lines = report.asked_lines(self._history, number, self._record.path)
        self._say("\n".join(lines))
        status = 128 + number
        return self._over(status, "asked to end", asked=True, by_interrupt=status == INTERRUPTED)

    def _over(
        self, status: int, reason: str, *, asked: bool = False, by_interrupt: bool = False
    ) -> RunEnd:
        last = self._history[-1] if self._history else None
        failed = [one.lived_s for one in self._history if one.way in (FAILED, REPLACED)]
        advice = self._resumption.advice(failed)
        if advice:
            self._say(advice)
        if status and last:
            self._record.harmlessly(lambda: self._fail_left_trials(status))
        if last and last.way != ASKED:
            self._record.harmlessly(lambda: self._parts.keep(last.lived_s))
        asked = asked or (last is not None and last.way == ASKED)
        self._record.end(status, reason, advice, asked=asked)
        verdict = last.diagnosis.verdict if last and last.way == FAILED else ""
        if verdict and self._gathered.identity.worker is None:
            self._record.harmlessly(lambda: record.leave_verdict(self._gathered.environ, verdict))
        return RunEnd(status, reason, verdict, by_interrupt, asked)

    def _fail_left_trials(self, status: int) -> None:
        """Mark trials of a study that still count as running as failed; most runs have none."""
        identity, launcher = self._gathered.identity, self._gathered.launcher
        plan = self._mitigations.plan(self._gathered)
        python = launcher.interpreter if launcher else plan.command[0]
        if identity.state is not None and python is not None:
            fail_left_over(identity.state, python, self._environment(plan), status, self._say)

    # --- one attempt -----------------------------------------------------------------------

    def _test_gpus(self) -> Preflight | None:
        """Have the GPUs tested if needed; during the test attempt 1's agent imports torch."""
        if not self._history and self._care.waits and not self._replaces_warm():
            self._prepare_agent(self._gathered)
        kind = self._history[-1].kind if self._history else ""
        return self._care.tested(kind)

    def _begin_attempt(self) -> LaunchPlan:
        last = self._history[-1] if self._history else None
        number, start = len(self._history) + 1, None
        if self._nodes:
            number, start = self._nodes.number, self._nodes.start
        identity = self._gathered.identity._replace(
            site=own_files.hooks_site(self._gathered.identity.site, self._record.path),
            attempt=number,
            checkpoint=self._resumption.checkpoint(number, start),
            previous=None if last is None or last.way == REPLACED else last.exit_code,
        )
        self._gathered = self._gathered._replace(identity=identity)
        if self._nodes:
            self._gathered = self._nodes.as_agreed(self._gathered)
        plan = self._mitigations.plan(self._gathered)
        self._watch = AttemptWatch(self._gathered, plan, self._mitigations.nccl_finding)
        self._looks = self._steps = None
        self._record.attempt(number, plan, self._history, self._gathered.facts.torch)
        return plan

    def _attempt(self, plan: LaunchPlan) -> Ended:
        """Run one attempt until none of its processes lives."""
        spec = AttemptSpec(
            plan.command,
            self._environment(plan),
            launcher=plan.launcher,
            no_python=plan.options.no_python,
            grace_s=grace_s(plan),
            receipts=self._gathered.identity.receipts,
            handled=plan.options.handled_signals,
            limits=plan.limits,
            unblocked=self._requests.blocked,
        )
        self._warm_up(plan)
        observer = Observer(
            ordered=lambda: self._record.harmlessly(own_files.hold),
            started=lambda keeper, launcher: self._started(plan, keeper, launcher),
            cold=self._note_cold,
            later=self._beside().__next__,
            later_s=LOAD_S,
            spared=lambda: (*self._keepers.pids(), *self._record.helpers()),
            check_job=lambda: self._looks.check_job() if self._looks else LOAD_S,
            asked=lambda: self._looks.ask() if self._looks else None,
            interrupted=lambda left_s: self._say(answer(left_s)),
        )
        ended = run_attempt(spec, observer, self._keepers.take())
        if imports := self._imports:
            self._record.harmlessly(lambda: imports.take(self._gathered.identity.attempt))
        return ended

    def _environment(self, plan: LaunchPlan) -> dict[str, str]:
        nodes = self._nodes.environ(plan) if self._nodes else {}
        return {**plan.environment(self._gathered.environ), **self._held.environ(), **nodes}

    def _started(self, plan: LaunchPlan, keeper: int, launcher: int) -> None:
        self._began_s = time.monotonic()
        self._record.harmlessly(lambda: self._watch.started(launcher))
        self._record.harmlessly(lambda: self._look_at(plan, keeper, launcher))
        self._record.harmlessly(lambda: self._record.started(keeper, launcher))

    def _look_at(self, plan: LaunchPlan, keeper: int, launcher: int) -> None:
        """Begin to watch an attempt.

        The modules for that are imported now, while the job starts.
        """
        from saferun.supervise.watch.looks import Looks
        from saferun.supervise.watch.running_job import RunningJob
        from saferun.supervise.watch.step_samples import StepSamples

        identity = self._gathered.identity
        job = RunningJob(
            plan=plan,
            number=identity.attempt,
            history=self._history,
            receipts=identity.receipts,
            record=self._record,
            longest=self._longest,
            saved_before=self._resumption.saved_before,
            say=self._say,
            environ=self._gathered.environ,
            keeper=keeper,
            launcher=launcher,
        )
        self._looks, self._steps = Looks(job), StepSamples(keeper, launcher, self._began_s)

    def _beside(self) -> Iterator[float]:
        """Work beside an attempt in steps; yield the seconds until the next step.

        First, the modules for its end are imported, then the next attempt is prepared. After that
        the journal regularly notes that the run lives, and its latest steps.
        """
        self._record.harmlessly(own_files.keep)
        prepares, waited_s = True, LOAD_S
        while waited_s < PREPARE_S:
            soon = prepares and self._replaces_warm()  # a process of a search may live only seconds
            if soon and self._knows_imports():
                self._record.harmlessly(lambda: self._prepare_agent(self._following()))
                prepares = soon = False
            pause_s = LOAD_S if soon else PREPARE_S - waited_s
            waited_s += pause_s
            yield pause_s
        while True:
            self._record.harmlessly(self._record.journal.alive)
            self._record.harmlessly(self._watch.observe_ranks)
            self._record.harmlessly(self._note_steps)
            if prepares and self._knows_imports():
                self._record.harmlessly(lambda: self._prepare_agent(self._following()))
                prepares = False
            rest = min(ALIVE_S, max(PREPARE_S, (time.monotonic() - self._began_s) / 4))
            yield PREPARE_S if prepares else rest

    def _note_steps(self) -> None:
        if self._steps and (text := self._steps.sample()):
            self._record.journal.steps(self._gathered.identity.attempt, text)

    def _following(self) -> RunInputs:
        """Return the inputs for the plan of the attempt after the running one."""
        identity = self._gathered.identity
        following = identity._replace(attempt=identity.attempt + 1)
        return self._gathered._replace(identity=following)

    def _prepare_agent(self, gathered: RunInputs) -> None:
        """Let the first process of a future attempt import its modules ahead."""
        self._warm_up(self._mitigations.plan(gathered), ahead=True)

    def _warm_up(self, plan: LaunchPlan, *, ahead: bool = False) -> None:
        """Let a process import ahead, for a later attempt or for one whose ranks it forks.

        Args:
            plan: the plan of the attempt.
            ahead: the attempt does not begin now.
        """
        replaces = self._replaces_warm()
        if (replaces and not ahead) or not (self._is_warm or ahead) or self._stays_cold:
            return
        env, listed = self._environment(plan), self._imports.path if self._imports else None
        warm = warm_start.offered(self._gathered.launcher, plan, env, listed)
        starts = "torchrun's own Python" if self._gathered.launcher else "python"
        why = self._keepers.prepare_warm(warm) if warm else f"{starts} does not start them"
        if why and replaces:
            self._note_cold(why)
        elif why and not ahead:
            self._say(f"start.ranks is warm, but ranks are started as usual: {why}")

    def _replaces_warm(self) -> bool:
        """Return whether a plain python process that replaces another should be warm."""
        return self._is_warm and self._gathered.launcher is None

    def _note_cold(self, why: str) -> None:
        """Report why a replacing process was not warm; if the reason recurs, none is prepared."""
        if self._replaces_warm():
            self._stays_cold = why in self._cold
            if not self._stays_cold:
                self._cold.add(why)
                self._say(f"start.ranks is warm, but a process is started as usual: {why}")

    def _knows_imports(self) -> bool:
        """Return whether the ranks' imports are known, or nobody needs them."""
        attempt = self._gathered.identity.attempt
        return self._imports is None or self._imports.known(attempt)

    # --- its end ---------------------------------------------------------------------------

    def _decided(self, plan: LaunchPlan, ended: Ended) -> Decision:
        """Decide; a fault of saferun itself becomes one line, and the job's status stands."""
        try:
            return self._met(plan, ended) or self._decide(plan, ended)
        except Exception as error:
            import traceback  # only our own fault needs it

            what = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(
                f"what the attempt's end means could not be decided, a fault of ours ({what})"
            )
            self._record.fault(error, traceback=traceback.format_exc())
            return Decision(retry_policy.STOP, "a fault of saferun's own")

    def _met(self, plan: LaunchPlan, ended: Ended) -> Decision | None:
        """Adopt the nodes' agreement; return a decision if they began no attempt."""
        ran = self._watch.ranks_ran
        decision = self._nodes.met(plan, ended, ranks_ran=ran) if self._nodes else None
        if decision is not None and decision.action == retry_policy.STOP:
            self._report(ended, decision, ())
        return decision

    def _decide(self, plan: LaunchPlan, ended: Ended) -> Decision:
        """Gather the facts, then decide; record and report the decision."""
        identity, looks = self._gathered.identity, self._looks
        self._record.mask_ranks(identity)
        ended = self._record.clean(ended)
        found, ranks_ran = self._watch.receipts(kept=self._record.journal.took_receipts())
        self._record.harmlessly(lambda: torchelastic_dirs.remove(found))
        self._mitigations.read_receipts(found, ranks_seen=ranks_ran)
        ended_s = time.monotonic() - self._began
        last = self._watch.outcome(ended, ended_s, self._mitigations.in_force)
        if last.replaced_for:
            assert self._watch.request is not None, "it has said why"
            self._record.journal.event(Recycled(last.number, *self._watch.request))
        elif ended.exit_code:
            cause, stall = (
                hang and hang._replace(line=self._record.journal.masked(hang.line))
                for hang in ((looks.cause, looks.stall) if looks else (None, None))
            )
            lost = self._nodes.lost() if self._nodes else ""
            last = self._watch.diagnosed(last, ended, cause, lost, stall)
        if looks:
            self._record.harmlessly(lambda: looks.ended(ended))
        last = self._resumption.judged(last, plan, ended)
        self._history.append(last)
        ranks = {receipt.rank for receipt in found if receipt.rank is not None}
        self._record.harmlessly(lambda: self._parts.note(last, ranks))
        following = self._following()
        decision = retry_policy.decide(
            self._history,
            plan.settings,
            usable=lambda name, in_force: self._mitigations.usable(following, name, in_force),
            jitter=os.urandom(1)[0] / 255,  # `random` costs 5 ms to import
        )
        if decision.action == retry_policy.DONE:
            self._mitigations.learn(self._gathered, plan)
        if decision.action == retry_policy.AGAIN:
            self._mitigations.have_nccl_tested(following, last, self._watch.nccl_tests)
        if self._nodes:
            decision = self._nodes.share(ended, decision)
        followed = decision._replace(delay_s=round(decision.delay_s, 3))
        self._record.ended(ended, last._replace(decision=followed))
        # A run that a signal ended may have had no time to leave receipts.
        problems = (
            () if end_requested(ended) else self._watch.hook_problems(found, ranks_ran=ranks_ran)
        )
        self._report(ended, decision, problems)
        return decision

    def _report(self, ended: Ended, decision: Decision, problems: tuple[str, ...]) -> None:
        added = [decision.add] if decision.add else []
        change = self._mitigations.describe([*added, *self._mitigations.beside])
        path, history = self._record.path, self._history
        host, diagnosis = (self._nodes.host, self._nodes.diagnosis) if self._nodes else ("", None)
        lines = report.attempt_lines(history, decision, change, path, host, diagnosis)
        if self._nodes and self._nodes.is_telling(decision):
            lines = []
        report.show(self._say, ended, [*problems, *lines])

    def _recover(self, plan: LaunchPlan, decision: Decision) -> None:
        """Recover the GPUs as the failure requires.

        Raises:
            EndRequestedError: a signal came during the recovery.
        """
        last = self._history[-1] if self._history else None
        if last is None or last.way != FAILED:
            return
        if last.number != self._gathered.identity.attempt:
            return  # the nodes met, but began no attempt
        again = decision.action == retry_policy.AGAIN
        found: tuple[Finding, ...] = ()

        def recover() -> None:
            nonlocal found
            found = self._care.recover(plan, last.kind, again=again)

        with self._requests.raised():
            self._record.harmlessly(recover)
        if found:
            self._record.journal.event(Recovery(found))
