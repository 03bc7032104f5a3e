"""The loop: attempts under a lock. Start, wait, diagnose, decide, start again or explain.

Everything it decides by is pure (plan/build.py, diagnosis/classify.py, diagnosis/retry_policy.py);
everything it touches has a room of its own (gpu/lock.py, journal/writer.py, attempt.py). An
attempt is over when no process of it lives.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from saferun.diagnosis import retry_policy
from saferun.errors import EXIT_UNAVAILABLE
from saferun.inject import contract
from saferun.model import LaunchPlan, ProcessLimits
from saferun.plan import torchrun_args
from saferun.plan.inputs import Gathered
from saferun.plan.view import announcement, as_json
from saferun.supervise.attempt import AttemptSpec, Ended, Observer, run_attempt
from saferun.supervise.gpu_gate import GpuCare, take_locks
from saferun.supervise.keeper_pool import Ready
from saferun.supervise.mitigations import Treatment
from saferun.supervise.replace import replace_process
from saferun.system.procfs import this_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.classify import Diagnosis
    from saferun.gpu.lock import Held
    from saferun.journal.writer import Journal

SHUTDOWN_S = 30  # what torchrun itself gives its workers (--shutdown-timeout)
MARGIN_S = 10.0  # beyond it, for torchrun's own end
# What ends a run that waits between attempts.
ASKING = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
VERDICT_FILE = "SAFERUN_VERDICT_FILE"  # the variable: a path of the user's
READY_S = 5.0  # into an attempt: ranks are up, and what the next attempt needs is made ready

Say = Callable[[str], None]
# Called before each attempt with its number and the seconds to wait; returns the number of a signal
# that asked the run to end meanwhile, else 0.
Before = Callable[[int, float], int]


class Pace(NamedTuple):
    """Who begins attempts and cares for the GPUs; a twin's script has a say in both."""

    before: Before
    care: Callable[[Gathered, LaunchPlan, Held, Say], GpuCare] = GpuCare


def supervise(gathered: Gathered, plan: LaunchPlan, say: Say, pace: Pace | None = None) -> int:
    """Run attempts until one succeeds or another would not help; return the exit status.

    Args:
        gathered: what the plan of every attempt is computed from.
        plan: of the first attempt, as it would be without a journal.
        say: takes lines for people.
        pace: of attempts, where it is not ours alone.

    Raises:
        BusyError: the GPUs are another run's.
        UnavailableError: the launcher cannot be started.
    """
    if plan.launcher == "torchrun":
        _hear_interrupts()
    with take_locks(gathered, plan, say) as held:
        pace = pace or Pace(_pause)
        care = pace.care(gathered, plan, held, say)
        shell = "no_python" in gathered.request.line.given  # a spare could not become its launcher
        ready = Ready(None if shell else gathered.launcher, held.descriptors())
        try:
            ready.keeper()
        except OSError as error:
            say(f"the job is not supervised, no process could be started for it: {error.strerror}")
            if not care.cleared("", lambda *_, **__: None):
                return EXIT_UNAVAILABLE
            held.inheritable()
            replace_process(plan, {**gathered.environ, **held.environ()})
        say(announcement(plan))
        return _Run(gathered, held, ready, say, pace.before, care).go()


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
    """One run: its attempts so far, and what they share."""

    def __init__(
        self,
        gathered: Gathered,
        held: Held,
        ready: Ready,
        say: Say,
        before: Before,
        care: GpuCare,
    ) -> None:
        self._before = before
        self._care = care
        self._began = time.monotonic()
        self._held = held
        self._ready = ready
        self._say = say
        self._journal = _begin_journal(gathered, say)
        identity = gathered.identity._replace(receipts=self._journal.receipts())
        if self._journal.path:  # another run may have had the name
            identity = identity._replace(run=os.path.basename(self._journal.path))
        self._gathered = gathered._replace(identity=identity)
        self._history: list[retry_policy.Try] = []
        self._diagnoses: list[Diagnosis] = []
        self._treatment = Treatment(self._gathered, self._journal.path or "")
        self._kills: Any = None  # witness.OutOfMemoryKills of the attempt that runs
        self._injected = False  # its processes were told to run hooks
        self._launcher = 0  # the launcher's pid
        self._ranks: Any = None  # witness.Ranks of the launcher, once they were looked at
        self._tails: tuple[int, bytes, bytes] | None = None  # that are not on the disk yet

    def go(self) -> int:
        """Run attempt after attempt; return the exit status of the last one."""
        try:
            self._recall()
            delay_s = 0.0
            while True:
                if stopped_by := self._before(len(self._history) + 1, delay_s):
                    return self._over(128 + stopped_by, "asked to end")
                if not self._cleared():
                    return self._over(EXIT_UNAVAILABLE, "the GPUs failed their trial")
                plan = self._plan()
                ended = self._attempt(plan)
                verdict = self._judged(plan, ended)
                if stopped_by := self._fix(plan, verdict):
                    return self._over(128 + stopped_by, "asked to end")
                if verdict.action != retry_policy.AGAIN:
                    return self._over(ended.exit_code, verdict.reason)
                if verdict.add:
                    self._treatment.add(verdict.add, self._history[-1].kind)
                delay_s = verdict.delay_s
        except Exception as error:
            self._journal.event("end", reason=f"{type(error).__name__}: {error}")
            raise
        finally:
            self._care.close()
            self._ready.drop()
            self._treatment.close()
            self._journal.close()

    def _over(self, status: int, reason: str) -> int:
        self._journal.event("end", status=status, reason=reason)
        self._keep_tails()
        self._harmlessly(self._leave_verdict)
        return status

    def _leave_verdict(self) -> None:
        """Tell whoever started us what the end of a failed run means, where that was asked for."""
        path = self._gathered.environ.get(VERDICT_FILE)
        last = self._history[-1] if self._history else None
        if path and last and last.exit_code and not last.asked:
            from saferun.system import paths

            paths.write_private(os.path.abspath(path), last.verdict.encode() + b"\n")

    def _cleared(self) -> bool:
        """Have the GPUs tried; meanwhile a torchrun imports torch, which becomes attempt 1."""
        if not self._history and self._care.waits:
            plan = self._treatment.plan(self._gathered)
            self._ready.spare(plan.command, self._environment(plan))
        kind = self._history[-1].kind if self._history else ""
        return self._care.cleared(kind, self._journal.event)

    def _fix(self, plan: LaunchPlan, verdict: retry_policy.Verdict) -> int:
        """Do what the failure asks for; return the number of a signal that came meanwhile, or 0."""
        last = self._history[-1] if self._history else None
        if last is None or last.asked:
            return 0
        again = verdict.action == retry_policy.AGAIN
        try:
            asked = self._care.fix(plan, last.kind, again=again, pause=lambda s: _pause(0, s))
        except Exception as error:
            self._journal.event("fault", what=f"{type(error).__name__}: {error}")
            return 0
        if self._care.fixed:
            self._journal.event("recovery", findings=[f._asdict() for f in self._care.fixed])
        return asked

    def _recall(self) -> None:
        """Begin with what helped this script here before, and say so; without it if that fails."""
        try:
            if said := self._treatment.recall(self._gathered, self._gathered.plan()):
                self._say(said)
        except Exception as error:
            self._say(f"what helped before could not be read ({type(error).__name__}: {error})")

    def _following(self) -> Gathered:
        """What the plan of the attempt after the running one is computed from."""
        identity = self._gathered.identity
        following = identity._replace(attempt=identity.attempt + 1)
        return self._gathered._replace(identity=following)

    def _plan(self) -> LaunchPlan:
        number = len(self._history) + 1
        identity = self._gathered.identity._replace(attempt=number)
        self._gathered = self._gathered._replace(identity=identity)
        plan = self._treatment.plan(self._gathered)
        self._injected = contract.VARIABLE in plan.env
        self._journal.plan(as_json(plan))
        by = this_process()
        self._journal.event("attempt", attempt=number, mitigations=plan.mitigations, by=by)
        return plan

    def _attempt(self, plan: LaunchPlan) -> Ended:
        """Run one attempt to its very end."""
        gathered = self._gathered
        line = gathered.request.line
        spec = AttemptSpec(
            plan.command,
            self._environment(plan),
            launcher=plan.launcher,
            no_python="no_python" in line.given,
            grace_s=grace_s(plan, line, gathered.environ),
            receipts=gathered.identity.receipts,
            limits=ProcessLimits(**plan.limits),
        )
        observer = Observer(
            started=lambda keeper, job: self._harmlessly(lambda: self._started(keeper, job)),
            later=lambda: self._harmlessly(self._make_ready),
            later_s=READY_S,
            spared=self._ready.pids,
        )
        return run_attempt(spec, observer, self._ready.take())

    def _environment(self, plan: LaunchPlan) -> dict[str, str]:
        return {**plan.environment(self._gathered.environ), **self._held.environ()}

    def _harmlessly(self, work: Callable[[], None]) -> None:
        """Do what the running job does not need: a fault of ours there is the journal's alone."""
        try:
            work()
        except Exception as error:
            self._journal.event("fault", what=f"{type(error).__name__}: {error}")

    def _make_ready(self) -> None:
        from saferun.diagnosis import classify, failure_report, signatures  # noqa: F401
        from saferun.journal import receipts  # noqa: F401
        from saferun.supervise import evidence

        signatures.load(self._gathered.environ)  # its cache is warm, should they be needed
        self._ranks = evidence.ranks(self._launcher)
        plan = self._treatment.plan(self._following())
        self._ready.spare(plan.command, self._environment(plan))

    def _started(self, keeper: int, launcher: int) -> None:
        from saferun.supervise.evidence import OutOfMemoryKills

        self._launcher, self._ranks = launcher, None
        self._kills = OutOfMemoryKills()  # the job is starting meanwhile
        self._journal.event("started", keeper=keeper, launcher=launcher)
        self._keep_tails()

    def _judged(self, plan: LaunchPlan, ended: Ended) -> retry_policy.Verdict:
        """Decide; a fault of ours there is said in one line, and the job's own end stands."""
        try:
            return self._judge(plan, ended)
        except Exception as error:
            import traceback

            what = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(
                f"what the attempt's end means could not be decided, a fault of ours ({what})"
            )
            self._journal.event("fault", traceback=traceback.format_exc())
            return retry_policy.Verdict(retry_policy.STOP, "a fault of saferun's own")

    def _judge(self, plan: LaunchPlan, ended: Ended) -> retry_policy.Verdict:
        """Learn what happened, decide, and say it."""
        number = len(self._history) + 1
        unguarded = self._read_receipts(ended)
        last = self._as_try(number, plan, ended)
        if ended.exit_code:
            last = self._diagnosed(last, ended)
        self._history.append(last)
        policy = retry_policy.policy(plan.retry, plan.policy["mitigate"])
        following = self._following()
        verdict = retry_policy.decide(
            self._history,
            policy,
            usable=lambda name, in_force: self._treatment.usable(following, name, in_force),
            jitter=_jitter(),
        )
        if verdict.action == retry_policy.DONE:
            self._treatment.learn(self._gathered, plan)
        self._record(number, ended, last, verdict)
        self._tell(ended, verdict, unguarded)
        return verdict

    def _as_try(self, number: int, plan: LaunchPlan, ended: Ended) -> retry_policy.Try:
        return retry_policy.Try(
            number=number,
            exit_code=ended.exit_code,
            lived_s=ended.lived_s,
            ended_s=time.monotonic() - self._began,
            mitigations=plan.mitigations,
            asked=_was_asked(ended),
            first_step=_first_step(ended),
            unkillable=bool(ended.unkillable),
        )

    def _diagnosed(self, last: retry_policy.Try, ended: Ended) -> retry_policy.Try:
        """Learn what an attempt failed of; for a success none of this is loaded."""
        from saferun.diagnosis import classify, signatures
        from saferun.supervise import evidence

        identity = self._gathered.identity
        kills = self._kills.since() if self._kills else None
        known = signatures.load(self._gathered.environ)
        seen = evidence.evidence(ended, identity.receipts, identity.attempt, kills)
        diagnosis = classify.classify(seen, known)
        self._diagnoses.append(diagnosis)
        return last._replace(
            kind=diagnosis.kind,
            verdict=diagnosis.verdict,
            offered=diagnosis.mitigations,
            waits=diagnosis.kind in known.kinds and known.kinds[diagnosis.kind].waits,
            fingerprint=classify.fingerprint(diagnosis),
        )

    def _record(
        self, number: int, ended: Ended, last: retry_policy.Try, verdict: retry_policy.Verdict
    ) -> None:
        self._journal.event(
            "ended",
            attempt=number,
            status=ended.exit_code,
            lived_s=round(ended.lived_s, 3),
            ended_by=ended.ended_by,
            signals=ended.forwarded,
            killed=ended.killed,
            unkillable=ended.unkillable,
            kind=last.kind,
            fingerprint=last.fingerprint,
            root_rank=self._diagnoses[-1].root_rank if ended.exit_code else None,
            root_line=self._diagnoses[-1].root_line if ended.exit_code else None,
            action=verdict.action,
            reason=verdict.reason,
            delay_s=round(verdict.delay_s, 3),
            add=verdict.add,
        )
        self._tails = (number, ended.stdout_tail, ended.stderr_tail)

    def _keep_tails(self) -> None:
        """Write what an attempt left to the disk; the next one has no use of us while it starts."""
        if self._tails is not None:
            self._journal.tails(*self._tails)
            self._journal.sync()
            self._tails = None

    def _tell(
        self, ended: Ended, verdict: retry_policy.Verdict, unguarded: tuple[str, ...]
    ) -> None:
        from saferun.diagnosis import failure_report

        history, diagnoses = self._history, self._diagnoses
        if verdict.action == retry_policy.DONE:
            lines = failure_report.success(history)
        elif verdict.action == retry_policy.AGAIN:
            change = self._treatment.describe([verdict.add] if verdict.add else [])
            lines = [failure_report.between(history[-1], diagnoses[-1], verdict, change)]
        else:
            host, journal = os.uname().nodename, self._journal.path
            lines = failure_report.failure(history, diagnoses, verdict, host=host, journal=journal)
        lines = [*unguarded, *lines]
        if lines:
            tail = ended.stdout_tail if ended.merged else ended.stderr_tail
            broken = bool(tail) and not tail.endswith((b"\n", b"\r"))  # such as a progress bar
            self._say("\n" * broken + "\n".join(lines))

    def _read_receipts(self, ended: Ended) -> tuple[str, ...]:
        """Take in what the ranks left; return what is to be said of the hooks in them.

        A run that was asked to end may not have come so far.
        """
        from saferun.journal import receipts

        identity, request = self._gathered.identity, self._gathered.request
        told = receipts.read(identity.receipts, identity.attempt)
        # Where the disk is full a rank's silence says nothing of its hooks.
        kept = self._journal.took_receipts() and not receipts.unwritten(
            identity.receipts, identity.attempt
        )
        seen = kept and bool(self._ranks and self._ranks.seen)
        self._treatment.notice(told, ranks_seen=seen)
        if _was_asked(ended):
            return ()
        foreign = "no_python" in request.line.given or "PYTHON_EXEC" in self._gathered.environ
        return receipts.judge(
            told,
            expects_hooks=self._injected and identity.receipts is not None,
            ranks_ran=seen,
            no_python=not self._ranks.isolated and foreign if seen else foreign,
        )


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


def grace_s(plan: LaunchPlan, line: Any, environ: Mapping[str, str]) -> float | None:
    """Return how long a job that was asked to end may take before it is killed; None: for ever.

    torchrun itself ends its workers within its own time; plain python takes as long as it takes
    without us.
    """
    if plan.launcher != "torchrun":
        return None
    text = torchrun_args.setting(line, environ, "shutdown_timeout") or ""
    return (float(text) if text.isdigit() else SHUTDOWN_S) + MARGIN_S


def _first_step(ended: Ended) -> int | None:
    from saferun.diagnosis.progress import first_step

    steps = [step for head in ended.heads if (step := first_step(head)) is not None]
    return max(steps, default=None)


def _was_asked(ended: Ended) -> bool:
    """Whether a signal made it end; a user's signal may also be one that the ranks live on with."""
    soon = SHUTDOWN_S + MARGIN_S
    return ended.interrupted or (ended.asked_s is not None and ended.asked_s <= soon)


def _begin_journal(gathered: Gathered, say: Say) -> Journal:
    from saferun.journal.writer import Journal
    from saferun.system.redact import Masker

    request = gathered.request
    masker = Masker(gathered.environ, (*request.line.args, *(text for _, text, _ in request.sets)))
    return Journal.begin(gathered.runs, gathered.identity.run, masker, say=say)


def _jitter() -> float:
    return os.urandom(1)[0] / 255  # `random` costs 5 ms to import
