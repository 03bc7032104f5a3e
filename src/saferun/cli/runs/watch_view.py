"""A watched run as lines, as one line and as JSON. Pure: no clock or file is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from saferun.base.durations import seconds
from saferun.cli.colour import Line
from saferun.cli.runs import run_facts, runs_view
from saferun.gpu.nvml import Load
from saferun.journal.attempts import RecordedAttempt
from saferun.journal.reader import RUNNING, UNKNOWN, Run
from saferun.supervise.watch.live_run import Job, Snapshot
from saferun.system.printable import printable

_QUIET_S = 15.0  # shorter silences are ordinary
_FEW, _BARS = 3, "▁▂▃▄▅▆▇█"
_HOT = 85  # degrees Celsius


def goes_on(run: Run) -> bool:
    """Return whether a run may still change."""
    return run.outcome in (RUNNING, UNKNOWN)


def lines(now: Snapshot, note: str = "") -> list[Line]:
    """Return a run at one moment; control characters in the job's text are replaced.

    Args:
        now: the run at that moment.
        note: text below it; "" for none.
    """
    run = now.run
    found = [Line("run", f"{printable(run.id)}: {_outcome(run)}", "bold")]
    found.append(Line("script", printable(run.script)))
    if run.outcome == UNKNOWN:
        found.append(Line("", "its process cannot be seen from here: its journal is shown", "red"))
    for job in now.jobs:
        found += _job(job, now.at)
    found += [Line(f"GPU {gpu.place}", _load(gpu), _heat(gpu)) for gpu in now.gpus]
    found.append(Line("retry", _retry(now)))
    found.append(Line("", note, "dim"))
    return [line for line in found if line.text]


def _outcome(run: Run) -> str:
    """Return text such as "running for 8.4 s, with free-port", or "ok; took 1 min 44 s"."""
    outcome, took = runs_view.outcome(run), run.took_s
    if took is None:
        return outcome
    if run.outcome == RUNNING:
        by = f", with {printable(', '.join(run.mitigations))}" if run.mitigations else ""
        return f"{RUNNING} for {seconds(took)}{by}"
    return f"{outcome}; took {seconds(took)}"


def _job(job: Job, at: float) -> Iterator[Line]:
    attempt = job.attempt
    worker = "" if attempt.worker is None else f"worker {attempt.worker}: "
    since = "" if attempt.started_at is None else seconds(max(0, at - attempt.started_at))
    took = since and f", for {since}"
    if attempt.lived_s is not None:
        took = f", lived {seconds(attempt.lived_s)}"
    names = attempt.begun.mitigations
    by = f", with {printable(', '.join(names))}" if names else ""
    yield Line("attempt", f"{worker}{attempt.number}{took}{by}")
    if attempt.outcome.kind:
        yield Line("failure", _failure(attempt), "red")
    if job.before:
        yield Line("before", _before_text(job, job.before, at), "yellow")
    yield Line("step", _step(job), "green")
    yield Line("rate", _spark(job.rates), "green")
    age = "" if job.output_s is None else f"{seconds(job.output_s)} ago: "
    yield Line("output", f"{age}{printable(job.line)}" if age else "")
    cores = "" if job.cores is None else f", {job.cores:.1f} cores in use"
    yield Line("ranks", f"{job.ranks}{cores}" if job.ranks else "")
    yield Line("silence", _silence(job, at), "yellow")
    yield Line("waits", _stall(job, at), "yellow")
    yield Line("loss", printable(attempt.loss), "yellow")
    yield Line("slow", printable(attempt.slow), "yellow")


def _failure(attempt: RecordedAttempt) -> str:
    outcome = attempt.outcome
    return printable(f"{run_facts.failure(outcome)}: {outcome.diagnosis.root_line}")


def _before_text(job: Job, before: RecordedAttempt, at: float) -> str:
    """Return why and when the previous attempt failed, and where this one continues."""
    lived_s = before.outcome.lived_s
    when = ""
    if before.started_at is not None:
        when = f", {seconds(max(0, at - before.started_at - lived_s))} ago"
    name = os.path.basename(job.attempt.begun.checkpoint.rstrip("/"))
    on = f"; went on from {printable(name)}" if name else ""
    what = printable(run_facts.failure(before.outcome))
    line = printable(before.outcome.diagnosis.root_line)
    text = f"attempt {before.number}: {what} after {seconds(lived_s)}{when}{on}"
    return f"{text}; {line}" if line else text


def _spark(rates: Sequence[float]) -> str:
    """Return rates as a small chart from 0 to the largest; "" for fewer than three."""
    most = max(rates, default=0.0)
    if len(rates) < _FEW or most <= 0:
        return ""
    return "".join(_BARS[round(max(0.0, rate) / most * (len(_BARS) - 1))] for rate in rates)


def _step(job: Job) -> str:
    if job.step is None:
        return ""
    if job.rate is None:
        return str(job.step)
    rate = f"{job.rate:.2f} a second" if job.rate >= 1 else f"{seconds(1 / job.rate)} each"
    return f"{job.step}, {rate}"


def _silence(job: Job, at: float) -> str:
    said = ""
    if job.hang_at is not None:
        said = f"it may hang, as reported {seconds(max(0, at - job.hang_at))} ago"
    if job.quiet_s is None or job.quiet_s < _QUIET_S:
        return said
    return f"no sign of work for {seconds(job.quiet_s)}{'; ' if said else ''}{said}"


def _stall(job: Job, at: float) -> str:
    if not job.stall:
        return ""
    since = "" if job.stall_at is None else f"; noted {seconds(max(0, at - job.stall_at))} ago"
    return printable(f"{job.stall}{since}")


def _load(gpu: Load) -> str:
    percent = "" if gpu.percent is None else f"{gpu.percent} %"
    memory = ""
    if gpu.used_mib is not None and gpu.total_mib is not None:
        memory = f"{gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB"
    heat = "" if gpu.celsius is None else f"{gpu.celsius} °C"
    return ", ".join(filter(None, (percent, memory, heat)))


def _heat(gpu: Load) -> str:
    return "red" if (gpu.celsius or 0) >= _HOT else ""


def _retry(now: Snapshot) -> str:
    """Return what will follow a failure, as far as the run has recorded it."""
    if not now.jobs or not goes_on(now.run):
        return ""
    job, parts = now.jobs[-1], []
    left = job.attempt.begun.left
    if left is not None:
        count = "no attempt is" if not left else f"{left} attempt{'s are' if left > 1 else ' is'}"
        parts.append(f"{count} left if this one makes no progress")
    if left and job.kind:
        names = printable(", ".join(job.untried)) or "no other setting is known to help"
        parts.append(f"against {printable(job.kind)}: {names}")
    if left and now.saved:
        step = f" (step {now.saved.step})" if now.saved.step >= 0 else ""
        parts.append(f"it would go on from {printable(now.saved.path)}{step}")
    return "; ".join(parts)


def one_line(now: Snapshot) -> str:
    """Return the run at one moment as one line, for a log or a pipe."""
    clock = f"{datetime.fromtimestamp(now.at):%H:%M:%S}"
    hidden = ["script", "retry", "output", "rate", "", *(["run"] if goes_on(now.run) else [])]
    shown = [line for line in lines(now) if line.label not in hidden]
    return f"{clock} {'; '.join(f'{line.label} {line.text}' for line in shown)}"


def changes(now: Snapshot) -> object:
    """Return a value that differs when there is something new to print."""
    return now.run.outcome, [(j.attempt, j.step, j.line, j.hang_at, j.stall) for j in now.jobs]


def as_json(now: Snapshot) -> dict[str, Any]:
    """Return the run at one moment for programs (schema 1); times in seconds, null if unknown."""
    return {
        "schema": 1,
        "at": now.at,
        "run": runs_view.as_json(now.run),
        "jobs": [_job_json(job) for job in now.jobs],
        "gpus": [gpu._asdict() for gpu in now.gpus],
        "checkpoint": now.saved._asdict() if now.saved else None,
    }


def _job_json(job: Job) -> dict[str, Any]:
    attempt, before = job.attempt, job.before and job.before.outcome
    return {
        **asdict(job),
        "attempt": attempt.number,
        "before": before
        and {
            "number": before.number,
            "kind": before.kind,
            "rank": before.root_rank,
            "line": before.diagnosis.root_line,
            "lived_s": before.lived_s,
        },
        "worker": attempt.worker,
        "mitigations": attempt.begun.mitigations,
        "left": attempt.begun.left,
    }
