"""What is known of a run and of its attempts, by label. Pure.

`runs show`, the report (text, Markdown, HTML) and `runs watch` render these facts, in this order;
a view adds what it alone has.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import TypeAlias

from saferun.base.durations import seconds
from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.journal.attempts import RecordedAttempt, on_rank
from saferun.journal.reader import RUNNING, UNKNOWN, RecordedPlan, Run
from saferun.journal.time_spent import UNSAVED, Spent
from saferun.journal.trials import processes

Labelled: TypeAlias = list[tuple[str, str]]

_RUN = (
    *("run", "script", "started", "took", "time", "ended", "replaced", "command", "profile"),
    *("sets", "host", "nodes", "GPUs", "versions", "journal", "lost"),
)
_ATTEMPT = (
    *("started", "lived", "status", "failure", "line", "your code", "stack", "from", "steps"),
    *("trial", "last loss", "with", "changed", "loss", "slow", "end", "time", "decision"),
    *("tail", "ranks", "hooks"),
)


def of_run(run: Run, plan: RecordedPlan, replaced: int, more: Labelled) -> Labelled:
    """Return the known facts about a whole run; unknown ones are left out.

    Args:
        run: the run.
        plan: the plan of its first attempt.
        replaced: number of processes that asked to be replaced.
        more: what the view alone has.
    """
    found = [
        ("ended", ending(run)),
        ("replaced", f"{processes(replaced)}, as asked; not shown" if replaced else ""),
        ("command", shlex.join(plan.command)),
        ("profile", f"{plan.profile} (launcher: {plan.launcher})" if plan.profile else ""),
        ("lost", f"{run.lost} events that could not be written" if run.lost else ""),
    ]
    return _ordered(_RUN, found + more)


def of_attempt(attempt: RecordedAttempt, spent: Spent, more: Labelled) -> Labelled:
    """Return the known facts about an attempt; unknown ones are left out.

    Args:
        attempt: the attempt.
        spent: how its time was spent.
        more: what the view alone has.
    """
    outcome = attempt.outcome
    found = [
        ("failure", failure(outcome)),
        ("line", outcome.diagnosis.root_line),
        ("your code", outcome.diagnosis.user_frame),
        *(("stack", frame) for frame in outcome.diagnosis.stack),
        ("from", "; ".join(outcome.diagnosis.decided_by)),
        ("with", ", ".join(attempt.begun.mitigations)),
        ("changed", ", ".join(attempt.changed)),
        ("loss", attempt.loss),
        ("slow", attempt.slow),
        ("end", ", ".join(_ending_events(outcome))),
        ("time", time(spent)),
        ("decision", _decision(outcome)),
        ("ranks", attempt.ranks_started),
        *(("hooks", line) for line in attempt.hooks),
    ]
    return _ordered(_ATTEMPT, found + more)


def _ordered(labels: Sequence[str], found: Labelled) -> Labelled:
    return sorted(filter(lambda one: one[1], found), key=lambda one: labels.index(one[0]))


def moment(at_s: float | None) -> str:
    """Return a local time for people; "?" if unknown."""
    try:
        return "?" if at_s is None else f"{datetime.fromtimestamp(at_s):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def settings(plan: RecordedPlan) -> list[str]:
    """Return NAME=value for the variables that were set, except those that every run has."""
    return [
        f"{name}={shlex.quote(str(value))}"
        for name, value in plan.env.items()
        if value is not None and name != "PYTHONPATH" and not name.startswith("SAFERUN_")
    ]


def ending(run: Run) -> str:
    """Return how a run ended: its status and the reason, or why the status is unknown."""
    status = "" if run.status is None else f"status {run.status}"
    if run.outcome == RUNNING:
        return f"not yet; saferun's pid is {run.process.get('pid')}"
    if run.outcome == UNKNOWN:
        host = run.process.get("host")
        where = f": it ran on {host}, or in another container" if host else ""
        return f"not known; its process cannot be seen from here{where}"
    if not status:
        last = moment(run.last_at)
        return f"without a record (killed, or the machine went down); last event at {last}"
    return f"{status}: {run.reason}" if run.reason else status


def failure(outcome: AttemptOutcome) -> str:
    """Return the kind of an attempt's failure and its rank; "" if there was none."""
    return f"{outcome.kind}{on_rank(outcome)}" if outcome.kind else ""


def _ending_events(outcome: AttemptOutcome) -> list[str]:
    """Return the signals and kills that ended an attempt."""
    found = [f"asked to end by {', '.join(outcome.signals)}"] if outcome.signals else []
    if outcome.ended_by not in ("", "job"):
        words = {"keeper": "its keeper was killed", "loss": "its loss is not a number"}
        found.append(words.get(outcome.ended_by, outcome.ended_by))
    found += [f"{outcome.killed} processes killed"] if outcome.killed else []
    pids = ", ".join(map(str, outcome.unkillable))
    return found + ([f"could not be killed: {pids}"] if pids else [])


def time(spent: Spent) -> str:
    """Return text such as "useful 50 s; done again 12 s (3 steps, since ck/7)".

    Work that no attempt has done again is called lost.
    """
    return "; ".join(f"{label} {text}" for label, text in time_parts(spent))


def time_parts(spent: Spent) -> list[tuple[str, str]]:
    """Return the parts of a time by label; parts shorter than a second are left out."""
    found = []
    if spent.useful_s >= 1:
        found.append(("useful", seconds(spent.useful_s)))
    why = f" ({spent.why})" if spent.why else ""
    least_s = 1 if spent.why in ("", *UNSAVED) else 0.1
    has_steps = spent.why[:1].isdigit() and not spent.done_again_s  # they took no time
    for label, part_s in (
        ("done again", spent.done_again_s - spent.lost_s),
        ("lost", spent.lost_s),
    ):
        if part_s >= least_s or (has_steps and label == "done again"):
            found.append((label, f"{seconds(part_s)}{why}"))
    if spent.starts_and_waits_s >= 1:
        found.append(("starts and waits", seconds(spent.starts_and_waits_s)))
    return found


def _decision(outcome: AttemptOutcome) -> str:
    """Return text such as "again: with compile-off, after 5 s"; "" if nothing failed."""
    made = outcome.decision
    if made.action in ("", "done"):
        return ""
    wait = f", after {seconds(made.delay_s)}" if made.delay_s else ""
    return f"{made.action}: {made.reason}{wait}"
