"""Runs, their attempts and the history of mitigations, as text and JSON.

Pure: this module reads neither files nor the clock. Times are local. Text of a job or of another
user is shown without control characters.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from saferun.base.durations import seconds
from saferun.cli.runs import run_facts, trials_view
from saferun.cli.runs.text_table import aligned
from saferun.diagnosis.explaining.failure_report import in_words
from saferun.diagnosis.signatures import Kind
from saferun.journal import reader
from saferun.journal.attempts import RecordedAttempt
from saferun.journal.cleanup import Cleaned
from saferun.journal.mitigation_history import RETRY_WITHOUT_S, Entry
from saferun.journal.part_history import Part
from saferun.journal.reader import RecordedPlan, Run
from saferun.journal.report import RunReport
from saferun.journal.time_spent import Spent, Times
from saferun.model import as_tree
from saferun.system.printable import printable

HEAD = ("ID", "STARTED", "TOOK", "ATTEMPTS", "OUTCOME", "SCRIPT")
_LABEL = 10
_UNITS = ("B", "KB", "MB", "GB", "TB")


# --- many runs ---------------------------------------------------------------------------------


def table(runs: Sequence[Run], now_s: float) -> str:
    """Return a table of runs, one line for each.

    Args:
        runs: the runs to show, in this order.
        now_s: seconds since the epoch; a time of another year is shown with its year.
    """
    rows = [HEAD, *(_row(run, now_s) for run in runs)]
    return "\n".join(aligned(rows, right=(HEAD.index("TOOK"), HEAD.index("ATTEMPTS"))))


def _row(run: Run, now_s: float) -> tuple[str, ...]:
    script = printable(run.script.rpartition("/")[2]) or "?"
    took = "?" if run.took_s is None else seconds(run.took_s)
    tried = str(run.attempts or "?")
    return (printable(run.id), _when(run.started_at, now_s), took, tried, outcome(run), script)


def outcome(run: Run) -> str:
    """Return how a run ended, as a short phrase."""
    if run.outcome == reader.FAILED and run.kind:
        return f"{reader.FAILED}: {printable(run.kind)}"
    if run.outcome not in (*reader.FINISHED, reader.RUNNING):
        return run.outcome
    mitigated = run.mitigations and run.outcome not in (reader.FAILED, reader.INTERRUPTED)
    return (
        f"{run.outcome}, with {printable(', '.join(run.mitigations))}" if mitigated else run.outcome
    )


def as_json(run: Run) -> dict[str, Any]:
    """Return a run for programs; times in seconds since the epoch, null where unknown."""
    lists = {"mitigations": [*run.mitigations], "script_args": [*run.script_args]}
    return {**asdict(run), **lists}


def cleaned(done: Cleaned, *, dry_run: bool) -> str:
    """Return what was removed, one line each, and the total."""
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {printable(run.id)} ({size_text(taken)})" for run, taken in done.removed]
    total = size_text(sum(taken for _, taken in done.removed))
    kept = f"{done.kept} kept"
    kept += f", {done.running} of them not over" if done.running else ""
    kept += f", {done.others} of them not yours" if done.others else ""
    runs = f"{len(done.removed)} run{'' if len(done.removed) == 1 else 's'}"
    return "\n".join([*lines, f"{verb} {runs}, {total}; {kept}"])


# --- one run -----------------------------------------------------------------------------------


def as_text(
    run: Run,
    tried: Sequence[RecordedAttempt],
    plan: RecordedPlan,
    times: Times,
    now_s: float,
    kinds: Mapping[str, Kind],
) -> str:
    """Return everything that is known about a run, for people.

    Args:
        run: the run.
        tried: its attempts.
        plan: the plan of its first attempt.
        times: how its time was spent.
        now_s: seconds since the epoch.
        kinds: kinds of failure; the one that ended the run is shown in words.
    """
    lines = [f"run {printable(run.id)}: {outcome(run)}"]
    if run.kind in kinds:
        lines[0] += f" ({in_words(kinds[run.kind].explanation)[0]})"
    replaced = sum(attempt.replaced for attempt in tried)
    own = [
        ("started", run_facts.moment(run.started_at)),
        ("took", "" if run.took_s is None else seconds(run.took_s)),
        ("time", run_facts.time(times.whole)),
        ("sets", ", ".join(run_facts.settings(plan))),
        ("journal", run.path),
    ]
    lines += [_labelled(*one) for one in run_facts.of_run(run, plan, replaced, own)]
    running = run.outcome == reader.RUNNING
    for attempt, spent in zip(tried, times.attempts, strict=True):
        if not attempt.replaced:
            lines += ["", *_attempt(attempt, spent, running=running, now_s=now_s)]
    return "\n".join(lines)


def _attempt(attempt: RecordedAttempt, spent: Spent, *, running: bool, now_s: float) -> list[str]:
    outcome = attempt.outcome
    lived = f"lived {seconds(outcome.lived_s)}"
    if not outcome.has_ended:
        since = now_s - (attempt.started_at or now_s)
        lived = f"running for {seconds(max(0.0, since))}" if running else "its end is unknown"
    status = f", status {outcome.exit_code}" if outcome.has_ended else ""
    worker = "" if attempt.worker is None else f"worker {attempt.worker}, "
    head = f"{worker}attempt {attempt.number}"
    lines = [f"{head}: {run_facts.moment(attempt.started_at)}, {lived}{status}"]
    tails = [("tail", f"{path} ({size_text(size)})") for path, size in attempt.tails]
    found = run_facts.of_attempt(attempt, spent, tails)
    return lines + [f"  {_labelled(label, text)}" for label, text in found]


def as_json_whole(
    run: Run, tried: Sequence[RecordedAttempt], plan: RecordedPlan, times: Times
) -> dict[str, Any]:
    """Return a run with its attempts and its first plan, for programs (schema 1).

    Args:
        run: the run, as read from its journal.
        tried: its attempts, in order.
        plan: the plan of its first attempt.
        times: how its time was spent.
    """
    shown = [
        {
            **_attempt_json(attempt),
            "lost": attempt.outcome.lost_work._asdict() if attempt.outcome.lost_work else {},
            "tails": [{"path": p, "bytes": size} for p, size in attempt.tails],
            "time": asdict(spent),
        }
        for attempt, spent in zip(tried, times.attempts, strict=True)
    ]
    whole = {**as_json(run), "time": asdict(times.whole)}
    return {"schema": 1, "run": whole, "attempts": shown, "plan": plan.raw or None}


def _attempt_json(attempt: RecordedAttempt) -> dict[str, Any]:
    """Return an attempt for programs."""
    begun, outcome = attempt.begun, attempt.outcome
    diagnosis, made = outcome.diagnosis, outcome.decision
    return {
        "number": attempt.number,
        "worker": attempt.worker,
        "started_at": attempt.started_at,
        "ready_at": attempt.ready_at,
        "lived_s": attempt.lived_s,
        "status": outcome.exit_code,
        "ended_by": outcome.ended_by,
        "kind": outcome.kind,
        "rank": outcome.root_rank,
        "line": diagnosis.root_line,
        "decided_by": diagnosis.decided_by,
        "stack": diagnosis.stack,
        "user_frame": diagnosis.user_frame,
        "mitigations": begun.mitigations,
        "changed": attempt.changed,
        "action": made.action,
        "reason": made.reason,
        "delay_s": made.delay_s,
        "signals": outcome.signals,
        "killed": outcome.killed,
        "unkillable": outcome.unkillable,
        "lost": outcome.lost_work and outcome.lost_work._asdict(),
        "tails": attempt.tails,
        "hooks": attempt.hooks,
        "ranks_started": attempt.ranks_started,
        "left": begun.left,
        "untried": made.untried,
        "loss": attempt.loss,
        "slow": attempt.slow,
        "replaced": attempt.replaced,
        "first_step": outcome.first_step,
        "gpus": begun.gpus,
        "price_per_gpu_hour": begun.price_per_gpu_hour,
    }


def report_json(report: RunReport) -> dict[str, Any]:
    """Return a run's report for programs (schema 1); its plan and trials are as in `runs show`."""
    tree = as_tree(report)
    tree["run"], tree["plan"] = as_json(report.run), report.plan.raw or None
    for shown, one in zip(tree["attempts"], report.attempts, strict=True):
        shown["attempt"] = _attempt_json(one.attempt)
    tree["trials"] = trials_view.as_json(report.trials, report.replacements)
    del tree["replacements"]
    return {"schema": 1, **tree}


# --- the history of mitigations ------------------------------------------------------------------


def mitigations(entries: Iterable[Entry], now_s: float) -> str:
    """Return the history of mitigations, by script."""
    lines: list[str] = []
    of = ""
    for entry in sorted(entries, key=lambda e: (e.key.script, e.at)):
        key = entry.key
        if key.script != of:
            of = key.script
            lines.append(printable(of))
        machine = f"{key.gpu or 'no GPU'}, torch {key.torch or '?'}"
        machine += f", driver {key.driver}" if key.driver else ""
        lines.append(printable(f"  {entry.mitigation}, for {entry.kind}"))
        lines.append(printable(f"    learned {run_facts.moment(entry.at)}; {_until(entry, now_s)}"))
        lines.append(printable(f"    on {machine}"))
        if entry.arguments is not None:
            lines.append(
                printable(f"    with the arguments: {shlex.join(entry.arguments) or 'none'}")
            )
    return "\n".join(lines)


def expires_at(entry: Entry) -> float | None:
    """Return when a run first omits the mitigation again, in Unix seconds; None: never."""
    return None if entry.arguments is None else entry.at + RETRY_WITHOUT_S


def mitigations_json(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the history of mitigations, for programs (schema 1)."""
    shown = []
    for entry in entries:
        facts = {k: v for k, v in entry._asdict().items() if k != "key"}
        shown.append({**entry.key._asdict(), **facts, "expires_at": expires_at(entry)})
    return {"schema": 1, "mitigations": shown}


def _until(entry: Entry, now_s: float) -> str:
    until = expires_at(entry)
    if until is None:
        return "holds until the GPU, torch or the driver changes"
    return (
        f"{'held' if until <= now_s else 'holds'} until {run_facts.moment(until)}, since it costs"
    )


# --- the history of parts ------------------------------------------------------------------------


def parts(known: Iterable[Part]) -> str:
    """Return the GPUs and hosts that have failed, each with its failures."""
    lines: list[str] = []
    for part in known:
        where = f"{part.gpu} of {part.host}" if part.gpu else part.host
        named = "; named before a job begins" if part.is_named else ""
        lines.append(
            printable(f"{where}: {len(part.failures)} of its last {part.runs} runs{named}")
        )
        for one in part.failures:
            lines.append(printable(f"  {one.kind}, {run_facts.moment(one.at)}, run {one.run}"))
    return "\n".join(lines)


def part_json(part: Part) -> dict[str, Any]:
    """Return a GPU or host for programs."""
    failures = [failure._asdict() for failure in part.failures]
    named = part.is_named
    return {**part._asdict(), "gpu": part.gpu or None, "failures": failures, "named": named}


# --- text --------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Return a number of bytes for people.

    >>> size_text(71), size_text(1536), size_text(5 * 1000**3)
    ('71 B', '1.5 KB', '5.0 GB')
    """
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{printable(text)}" if text else ""


def _when(at_s: float | None, now_s: float) -> str:
    if at_s is None:
        return "?"
    then = datetime.fromtimestamp(at_s)
    this_year = then.year == datetime.fromtimestamp(now_s).year
    return f"{then:%m-%d %H:%M}" if this_year else f"{then:%Y-%m-%d}"
