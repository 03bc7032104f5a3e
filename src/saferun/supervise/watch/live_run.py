"""The present state of a run, read by another process without any effect on the run.

The journal has its attempts; the keeper's memory files (keeper/output_tail.py) or the job's own
files have the end of its output; /proc has its ranks, and NVML its GPUs. Values that cannot be read
are unknown.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from saferun.base import proc, untrusted
from saferun.diagnosis.silence import Look
from saferun.errors import UnavailableError
from saferun.gpu import nvml
from saferun.gpu.nvml import Load
from saferun.journal import events, reader
from saferun.journal.attempts import RecordedAttempt, attempts
from saferun.journal.event_types import JobStarted, Stall
from saferun.journal.reader import RecordedPlan, Run
from saferun.model import Checkpoint
from saferun.settings import ResumePolicy
from saferun.supervise.changes import resumption
from saferun.supervise.watch import live_job, work_signs
from saferun.supervise.watch.live_job import LiveJob
from saferun.system.redact import Masker

_LINE_CHARS = 500
_RATE_S = 60.0  # period over which a rate is measured
_RATES = 40  # number of looks whose rates are kept
_NVML_S, _NVML_AGAIN_S = 5.0, 60.0  # wait for an answer of NVML; pause after none came
_SAVED_S = 10.0  # between two looks for checkpoints


@dataclass(frozen=True, slots=True)
class Job:
    """The running or last attempt of the run, or of one of its workers."""

    attempt: RecordedAttempt
    step: int | None = None
    rate: float | None = None  # steps a second
    rates: tuple[float, ...] = ()  # rates at the last looks
    line: str = ""  # the last line of its output
    output_s: float | None = None  # seconds since its last output
    ranks: int = 0
    cores: float | None = None  # CPU cores that it uses
    quiet_s: float | None = None  # seconds since its last sign of work, as far as it was watched
    hang_at: float | None = None  # when the run reported that it may hang
    stall: str = ""  # the rank that the others wait for, as the run noted
    stall_at: float | None = None
    before: RecordedAttempt | None = None  # the last failed attempt before it
    kind: str = ""  # the kind of the last failure
    untried: tuple[str, ...] = ()  # mitigations of that kind that are left


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    run: Run
    at: float  # seconds since the epoch
    jobs: tuple[Job, ...]
    gpus: tuple[Load, ...]
    saved: Checkpoint | None  # the checkpoint from which a retry would resume


class LiveRun:
    """A run that is read repeatedly.

    Args:
        run: the run as found in the journal.
        environ: the user's environment, in which NVML is found.
    """

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        self._base, self._id = os.path.split(run.path)
        self._plan = reader.read_plan(run.path)
        pid = run.process.get("pid", 0)
        variables, words = {**environ, **proc.environ(pid)}, proc.command(pid)
        self._masker = Masker(variables, [*self._plan.command, *words])
        self._gpus = _Gpus(self._plan, environ)
        self._jobs: dict[int | None, Watched] = {}
        self._saved: Checkpoint | None = None
        self._saved_at_s = float("-inf")

    def snapshot(self) -> Snapshot:
        """Return the present state.

        Raises:
            UnavailableError: the journal is gone or not readable any more.
        """
        now = time.time()
        try:
            run = reader.read(self._base, self._id, now)
        except PermissionError:
            run = None
        if run is None:
            where = os.path.join(self._base, self._id)
            raise UnavailableError("this run's journal cannot be read any more", where=where)
        lives = run.outcome == reader.RUNNING
        log = events.read(run.path)
        by_worker = itertools.groupby(attempts(run), key=lambda attempt: attempt.worker)
        jobs = [self._job(list(tried), log, lives) for _, tried in by_worker]
        gpus = self._gpus.loads() if lives else ()
        return Snapshot(run, now, tuple(jobs), gpus, self._checkpoint(run) if lives else None)

    def _job(
        self, tried: Sequence[RecordedAttempt], log: Sequence[events.Event], lives: bool
    ) -> Job:
        worker = tried[-1].worker
        mine = [event for event in log if event.worker == worker]
        begun = max((at for at, e in enumerate(mine) if e.name == "attempt"), default=0)
        hangs = [event.at for event in mine[begun:] if event.name == "hang"]
        stalls = [(e.at, e.facts.line) for e in mine[begun:] if isinstance(e.facts, Stall)]
        failed = next((one for one in reversed(tried) if one.outcome.kind), None)
        before = next((one for one in reversed(tried[:-1]) if one.outcome.kind), None)
        job = Job(tried[-1], hang_at=hangs[-1] if hangs else None, before=before)
        if stalls and lives and stalls[-1][1]:
            job = replace(job, stall=stalls[-1][1], stall_at=stalls[-1][0])
        if failed:
            job = replace(job, kind=failed.outcome.kind, untried=failed.outcome.decision.untried)
        started = [e.facts for e in mine[begun:] if isinstance(e.facts, JobStarted)]
        if not started or not lives or tried[-1].outcome.has_ended:
            return job
        watched = self._jobs.get(worker)
        if watched is None or watched.started != started[-1]:
            watched = self._jobs[worker] = Watched(started[-1])
        return watched.with_observed(job, self._masker)

    def _checkpoint(self, run: Run) -> Checkpoint | None:
        """Return the checkpoint from which a retry would resume; it is updated at intervals."""
        policy = untrusted.mapping(untrusted.mapping(self._plan.raw.get("retry")).get("resume"))
        pid = run.process.get("pid", 0)
        if policy.get("checkpoints") and time.monotonic() >= self._saved_at_s + _SAVED_S:
            self._saved_at_s = time.monotonic()
            wanted = events.record(ResumePolicy, policy)
            self._saved = resumption.saved_since(
                wanted,
                self._plan.script_args,
                proc.environ(pid),
                proc.link(f"/proc/{pid}/cwd"),
                run.started_at or 0.0,
            )
        return self._saved


class Watched:
    """The processes of one attempt.

    Args:
        started: the pids of the processes.
    """

    def __init__(self, started: JobStarted) -> None:
        self.started, self._live = started, LiveJob(*started)
        self._points: deque[tuple[float, int]] = deque()  # when a new step was seen, and the step
        self._step: int | None = None  # the last step seen
        self._ranks: list[int] = []  # pids of the ranks
        self._last: Look | None = None
        self._worked_at_s = time.monotonic()
        self._rates: deque[float] = deque(maxlen=_RATES)

    def with_observed(self, job: Job, masker: Masker) -> Job:
        """Return a job with the present state of its processes, its output without secrets."""
        now = time.monotonic()
        ends = list(self._live.ends())
        newest, output_s = min(ends, key=lambda one: one[1], default=(b"", None))
        reported = live_job.newest_step(ends)
        seen = self._live.look(now, work_signs.tree())
        last, self._last = self._last, seen
        cores = None
        if seen and last:
            cores = max(0.0, (seen.cpu_s - last.cpu_s) / max(now - last.at_s, 0.001))
        if seen is None or last is None or seen.work != last.work:
            self._worked_at_s = now
        step = reported[0] if reported else None
        rate = self.rate(now, step, [one.pid for one in seen.ranks] if seen else [])
        self._rates.extend([] if rate is None else [rate])
        return replace(
            job,
            step=step,
            rate=rate,
            rates=tuple(self._rates),
            line=_last_line(masker.data(newest)),
            output_s=output_s,
            ranks=len(seen.ranks) if seen else 0,
            cores=cores,
            quiet_s=now - self._worked_at_s if seen else None,
        )

    def rate(self, now: float, step: int | None, ranks: list[int]) -> float | None:
        """Return the steps a second over the last minute; None if unknown.

        Only steps during the life of these ranks count: the first step seen may be old, or belong
        to earlier ranks.

        Args:
            now: the current time in seconds, by a clock that never jumps.
            step: the last step in the output.
            ranks: the pids of the ranks.
        """
        if ranks != self._ranks or (step or 0) < (self._step or 0):
            self._points.clear()
            self._ranks = ranks
        if step is not None and self._step not in (None, step):
            self._points.append((now, step))
        self._step = step
        while len(self._points) > 2 and self._points[1][0] < now - _RATE_S:
            self._points.popleft()
        if len(self._points) < 2:
            return None
        times = [at for at, _ in self._points]
        longest_s = max(later - at for at, later in itertools.pairwise(times))
        until = times[-1] if now - times[-1] <= longest_s else now
        return (self._points[-1][1] - self._points[0][1]) / (until - times[0])


def _last_line(output: bytes) -> str:
    lines = output[-4 * _LINE_CHARS :].decode("utf-8", "replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[-_LINE_CHARS:]


class _Gpus:
    """NVML's data on the GPUs of a run.

    Args:
        plan: the run's plan.
        environ: the user's environment, in which NVML is found.
    """

    def __init__(self, plan: RecordedPlan, environ: Mapping[str, str]) -> None:
        locks = untrusted.mapping(plan.raw.get("locks"))
        self._devices = untrusted.strings(locks.get("devices"))
        self._environ = environ
        self._next_s = float("-inf")

    def loads(self) -> tuple[Load, ...]:
        """Return how busy the GPUs are; () if unknown."""
        if not self._devices or time.monotonic() < self._next_s:
            return ()
        answer = nvml.ask(self._environ, _NVML_S)
        if answer.status is None or not answer.program:
            self._next_s = time.monotonic() + _NVML_AGAIN_S
        cards = (answer.report.card(uuid) for uuid in self._devices)
        return tuple(card.load() for card in cards if card)
