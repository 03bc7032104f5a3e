"""The loop: attempts under a lock. Start, wait, diagnose, decide, start again or explain.

Everything it decides by is pure (plan/build.py, diagnosis/classify.py, diagnosis/retry_policy.py);
everything it touches has a file of its own (gpu/lock.py, journal/writer.py, attempt.py). An
attempt is over when no process of it lives.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from saferun.diagnosis import retry_policy
from saferun.errors import EXIT_UNAVAILABLE, BusyError
from saferun.model import LaunchPlan
from saferun.named_tuple import NamedTuple
from saferun.plan.inputs import Gathered
from saferun.plan.view import announcement
from saferun.supervise import record
from saferun.supervise.attempt import AttemptSpec, Ended, Observer, run_attempt
from saferun.supervise.attempt_watch import MARGIN_S, SHUTDOWN_S, AttemptWatch, was_asked
from saferun.supervise.gpu_gate import GpuCare, take_locks
from saferun.supervise.keeper_pool import Ready
from saferun.supervise.mitigations import RunMitigations
from saferun.supervise.record import Record
from saferun.supervise.replace import replace_process
from saferun.system.descriptors import plug_closed_descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.classify import Diagnosis
    from saferun.gpu.lock import Held

# What ends a run that waits between attempts.
ASKING = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
READY_S = 5.0  # into an attempt: ranks are up, and what the next attempt needs is made ready

Say = Callable[[str], None]
# Called before each attempt with its number and the seconds to wait; returns the number of a signal
# that asked the run to end meanwhile, else 0.
Before = Callable[[int, float], int]


class Pace(NamedTuple):
    """Who begins attempts and cares for the GPUs; a generated script has a say in both."""

    before: Before
    care: Callable[[Gathered, LaunchPlan, Held, Say], GpuCare] = GpuCare


class Means(NamedTuple):
    """What a run has to work with."""

    held: Held  # its locks
    ready: Ready  # the keeper of the next attempt
    care: GpuCare
    record: Record
    before: Before
    say: Say


def supervise(gathered: Gathered, say: Say, pace: Pace | None = None) -> int:
    """Run attempts until one succeeds or another would not help; return the exit status.

    Args:
        gathered: what the plan of every attempt is computed from.
        say: takes lines for people.
        pace: of attempts, where it is not ours alone.

    Raises:
        BusyError: the GPUs are another run's.
        UnavailableError: the launcher cannot be started.
    """
    if gathered.launcher is not None:
        _hear_interrupts()
    pace = pace or Pace(_pause)
    plug_closed_descriptors()  # or the journal's would become the job's output
    gathered, journal = record.begin(gathered, say)
    try:
        held = take_locks(gathered, say)
    except BusyError:
        journal.discard()
        raise
    with held:
        plan = gathered.plan()
        care = pace.care(gathered, plan, held, say)
        shell = gathered.request.options.no_python  # a spare could not become its launcher
        ready = Ready(None if shell else gathered.launcher, held.descriptors())
        try:
            ready.keeper()
        except OSError as error:
            journal.discard()
            return _unsupervised(gathered, plan, held, care, error)
        say(announcement(plan))
        means = Means(held, ready, care, Record(journal), pace.before, say)
        return _Run(gathered, plan, means).go()


def _unsupervised(
    gathered: Gathered, plan: LaunchPlan, held: Held, care: GpuCare, error: OSError
) -> int:
    """Become the job, where no process can be started beside it."""
    from saferun.system.stderr import say

    say(f"the job is not supervised, no process could be started for it: {error.strerror}")
    if not care.cleared("", lambda granted, findings: None):
        return EXIT_UNAVAILABLE
    held.inheritable()
    return replace_process(plan, {**gathered.environ, **held.environ()})


def _hear_interrupts() -> None:
    """Hear Ctrl-C and Ctrl-\\ where a shell has started us with them ignored, as it does for `&`.

    torchrun takes them there, too (elastic/multiprocessing/api.py): a job that did not would live
    on after the Ctrl-C that ends its script.
    """
    for number, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)


class _Run:
    """One run: its attempts so far, and what they share.

    Args:
        gathered: what the plan of every attempt is computed from.
        first: the plan of attempt 1 without mitigations.
        means: what it has to work with.
    """

    def __init__(self, gathered: Gathered, first: LaunchPlan, means: Means) -> None:
        self._gathered = gathered
        self._means = means
        self._record = means.record
        self._began = time.monotonic()
        self._history: list[retry_policy.Try] = []
        self._diagnoses: list[Diagnosis] = []
        self._mitigations = RunMitigations(gathered, first, self._record.path or "")
        self._watch = AttemptWatch(gathered, first)

    def go(self) -> int:
        """Run attempt after attempt; return the exit status of the last one."""
        try:
            self._recall()
            delay_s = 0.0
            while True:
                if stopped_by := self._means.before(len(self._history) + 1, delay_s):
                    return self._over(128 + stopped_by, "asked to end")
                if not self._cleared():
                    return self._over(EXIT_UNAVAILABLE, "the GPUs failed their trial")
                plan = self._begin_attempt()
                ended = self._attempt(plan)
                decision = self._decided(plan, ended)
                if stopped_by := self._recover(plan, decision):
                    return self._over(128 + stopped_by, "asked to end")
                if decision.action != retry_policy.AGAIN:
                    return self._over(ended.exit_code, decision.reason)
                if decision.add:
                    self._mitigations.add(decision.add, self._history[-1].kind)
                delay_s = decision.delay_s
        except Exception as error:
            self._record.end(None, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._means.care.close()
            self._means.ready.drop()
            self._mitigations.close()
            self._record.close()

    def _over(self, status: int, reason: str) -> int:
        self._record.end(status, reason)
        last = self._history[-1] if self._history else None
        self._record.harmlessly(lambda: record.leave_verdict(self._gathered, last))
        return status

    def _recall(self) -> None:
        """Begin with what helped this script here before, and say so; without it if that fails."""
        try:
            if line := self._mitigations.recall(self._gathered):
                self._means.say(line)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._means.say(f"what helped before could not be read ({what})")

    def _cleared(self) -> bool:
        """Have the GPUs tried; meanwhile a torchrun imports torch, which becomes attempt 1."""
        if not self._history and self._means.care.waits:
            plan = self._mitigations.plan(self._gathered)
            self._means.ready.spare(plan.command, self._environment(plan))
        kind = self._history[-1].kind if self._history else ""
        return self._means.care.cleared(kind, self._record.preflight)

    def _begin_attempt(self) -> LaunchPlan:
        identity = self._gathered.identity._replace(attempt=len(self._history) + 1)
        self._gathered = self._gathered._replace(identity=identity)
        plan = self._mitigations.plan(self._gathered)
        self._watch = AttemptWatch(self._gathered, plan)
        self._record.attempt(identity.attempt, plan)
        return plan

    def _attempt(self, plan: LaunchPlan) -> Ended:
        """Run one attempt to its very end."""
        spec = AttemptSpec(
            plan.command,
            self._environment(plan),
            launcher=plan.launcher,
            no_python=plan.options.no_python,
            grace_s=grace_s(plan),
            receipts=self._gathered.identity.receipts,
            limits=plan.limits,
        )
        observer = Observer(
            started=self._started,
            later=lambda: self._record.harmlessly(self._make_ready),
            later_s=READY_S,
            spared=self._means.ready.pids,
        )
        return run_attempt(spec, observer, self._means.ready.take())

    def _environment(self, plan: LaunchPlan) -> dict[str, str]:
        return {**plan.environment(self._gathered.environ), **self._means.held.environ()}

    def _following(self) -> Gathered:
        """What the plan of the attempt after the running one is computed from."""
        identity = self._gathered.identity
        following = identity._replace(attempt=identity.attempt + 1)
        return self._gathered._replace(identity=following)

    def _started(self, keeper: int, launcher: int) -> None:
        self._record.harmlessly(lambda: self._watch.started(launcher))
        self._record.harmlessly(lambda: self._record.started(keeper, launcher))

    def _make_ready(self) -> None:
        """Load what a failure will need, and have the next attempt's torchrun import torch."""
        from saferun.diagnosis import classify, signatures  # noqa: F401
        from saferun.journal import receipts  # noqa: F401
        from saferun.supervise import report  # noqa: F401

        signatures.load(self._gathered.environ)  # its cache is warm, should they be needed
        self._watch.look()
        plan = self._mitigations.plan(self._following())
        self._means.ready.spare(plan.command, self._environment(plan))

    def _decided(self, plan: LaunchPlan, ended: Ended) -> retry_policy.Decision:
        """Decide; a fault of ours there is said in one line, and the job's own end stands."""
        try:
            return self._decide(plan, ended)
        except Exception as error:
            import traceback

            what = " ".join(f"{type(error).__name__}: {error}".split())
            self._means.say(
                f"what the attempt's end means could not be decided, a fault of ours ({what})"
            )
            self._record.fault(error, traceback=traceback.format_exc())
            return retry_policy.Decision(retry_policy.STOP, "a fault of saferun's own")

    def _decide(self, plan: LaunchPlan, ended: Ended) -> retry_policy.Decision:
        """Learn what happened, decide, and say it."""
        found, ranks_ran = self._watch.receipts(kept=self._record.takes_receipts)
        self._mitigations.notice(found, ranks_seen=ranks_ran)
        diagnosis = None
        last = self._watch.as_try(ended, time.monotonic() - self._began)
        if ended.exit_code:
            last, diagnosis = self._watch.diagnosed(last, ended)
            self._diagnoses.append(diagnosis)
        self._history.append(last)
        following = self._following()
        decision = retry_policy.decide(
            self._history,
            retry_policy.Policies(plan.settings.retry, plan.settings.mitigate),
            usable=lambda name, in_force: self._mitigations.usable(following, name, in_force),
            jitter=_jitter(),
        )
        if decision.action == retry_policy.DONE:
            self._mitigations.learn(self._gathered, plan)
        self._record.ended(ended, last, diagnosis, decision)
        # A run that was asked to end may not have come so far as to leave receipts.
        problems = () if was_asked(ended) else self._watch.hook_problems(found, ranks_ran=ranks_ran)
        self._report(ended, decision, problems)
        return decision

    def _report(
        self, ended: Ended, decision: retry_policy.Decision, problems: tuple[str, ...]
    ) -> None:
        from saferun.supervise import report

        change = self._mitigations.describe([decision.add] if decision.add else [])
        path = self._record.path
        lines = report.lines_of(self._history, self._diagnoses, decision, change, path)
        report.tell(self._means.say, ended, [*problems, *lines])

    def _recover(self, plan: LaunchPlan, decision: retry_policy.Decision) -> int:
        """Do for the GPUs what the failure asks for; return the number of a signal, or 0."""
        last = self._history[-1] if self._history else None
        if last is None or last.asked:
            return 0
        care, again = self._means.care, decision.action == retry_policy.AGAIN
        try:
            asked = care.recover(plan, last.kind, again=again, pause=lambda s: _pause(0, s))
        except Exception as error:
            self._record.fault(error)
            return 0
        if care.recovered:
            self._record.recovery(care.recovered)
        return asked


def _pause(number: int, delay_s: float) -> int:
    """Wait before an attempt, unless a signal comes; see `Before`."""
    if delay_s <= 0:
        return 0
    from saferun.system.signalfd import Signals

    until = time.monotonic() + delay_s
    with Signals(ASKING) as signals:
        while (left_s := until - time.monotonic()) > 0:
            select.select([signals.fd], [], [], left_s)
            heard = [number for number, _ in signals.read()]
            if heard:
                return heard[0]
    return 0


def grace_s(plan: LaunchPlan) -> float | None:
    """Return how long a job that was asked to end may take before it is killed; None: for ever.

    torchrun itself ends its workers within its own time; plain python takes as long as it takes
    without us.
    """
    if plan.launcher != "torchrun":
        return None
    given = plan.options.shutdown_timeout_s
    return (SHUTDOWN_S if given is None or given < 0 else given) + MARGIN_S


def _jitter() -> float:
    return os.urandom(1)[0] / 255  # `random` costs 5 ms to import
