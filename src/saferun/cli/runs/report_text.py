"""A run's report in words, and as Markdown to paste into an issue. Pure.

A job's text stands in code spans and fences that it cannot close, so it cannot act as markup or
mention somebody.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from datetime import datetime, timezone

from saferun.base.durations import seconds
from saferun.cli.runs import run_facts, trials_view
from saferun.cli.runs.run_facts import Labelled
from saferun.diagnosis.explaining.failure_report import in_words
from saferun.journal import trials
from saferun.journal.reader import RUNNING
from saferun.journal.report import FIRST, Amount, AttemptReport, Cost, RunReport
from saferun.journal.tail_excerpt import Excerpt, Row
from saferun.journal.trials import Trial
from saferun.system.printable import printable

_CRASHED = 3  # most crashed trials that are named
CHARS = 2000  # most characters of a text
_TAILS = 3  # most failed attempts whose last lines stand in the Markdown
_LINE_CHARS = 200
_PLAIN = re.compile(r"(?!.*www\.)[A-Za-z0-9 .,:;()…-]*", re.ASCII)

# Of an attempt's facts, those that stand above or below the others.
_APART = ("failure", "line", "your code", "stack", "loss", "slow", "hooks")


def shown(text: object, *, kept: str = "") -> str:
    """Return a job's or user's text in a form that is safe to show, cut if very long."""
    clean = printable(text, CHARS + 1, kept=kept)
    return clean if len(clean) <= CHARS else f"{clean[:CHARS]}…"


def moment(at_s: float | None) -> str:
    """Return a time for readers of any time zone."""
    try:
        then = None if at_s is None else datetime.fromtimestamp(at_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        then = None
    return f"{then:%Y-%m-%d %H:%M:%S} UTC" if then else ""


def facts_of_run(report: RunReport) -> Labelled:
    """Return the known facts about the whole run, by label; unknown ones are left out."""
    run, hosts = report.run, report.hosts
    own = [
        ("run", run.id),
        ("script", report.plan.script),
        ("started", moment(run.started_at)),
        ("host", "" if hosts else str(run.process.get("host") or "")),
        ("nodes", f"{len(hosts)}: {', '.join(hosts)}" if hosts else ""),
        ("GPUs", _gpus(report)),
        ("versions", ", ".join(report.versions)),
    ]
    return run_facts.of_run(run, report.plan, report.replaced, own)


def _gpus(report: RunReport) -> str:
    gpus, names = report.cost.gpus, ", ".join(report.gpu_names)
    here = " on this node" if len(report.hosts) > 1 else ""
    return f"{gpus}{names and f' ({names})'}{here}" if gpus else ""


def costs(report: RunReport) -> Labelled:
    """Return what the run has used and what for, by label."""
    cost = report.cost
    found = [("used", _amount(cost, cost.used))]
    found += [(label, _amount(cost, part)) for label, part in three_parts(report)]
    if cost.used.money is not None:
        found.append(("price of a GPU-hour", f"{cost.price_per_gpu_hour:g}"))
    return found


def three_parts(report: RunReport) -> list[tuple[str, Amount]]:
    """Return the parts of the run's time, by label; their sum is the whole time."""
    cost = report.cost
    again = "done again or lost" if cost.lost.s else "done again"
    return [
        ("useful", cost.useful),
        ("lost" if cost.lost.s >= cost.done_again.s > 0 else again, cost.done_again),
        ("starts and waits", cost.starts_and_waits),
    ]


def _amount(cost: Cost, part: Amount) -> str:
    hours = f", {part.gpu_hours:.2f} GPU-hours" if cost.gpus else ""
    money = "" if part.money is None else f", {part.money:.2f} in money"
    return f"{seconds(part.s)}{hours}{money}"


def searched(report: RunReport) -> Labelled:
    """Return the results of a search, by label; [] if the run made no trials."""
    if not report.trials:
        return []
    best, crashed = trials.best(report.trials), [t for one in report.attempts for t in one.trials]
    done = sum(not trial.again for trial in report.trials)
    hours = report.cost.used.s / 3600
    found = [
        ("study", ", ".join(sorted({trial.study for trial in report.trials if trial.study}))),
        ("best value", best and f"{best.values[0]:.6g}, trial {best.number}: {_params(best)}"),
        ("trials an hour", _rounded(done / hours) if hours else ""),
        ("crashed in", "; ".join(f"trial {t.number}: {_params(t)}" for t in crashed[:_CRASHED])),
    ]
    return [(label, text) for label, text in found if text]


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _params(trial: Trial) -> str:
    return trials_view.parameters(trial) or "no parameters"


def title(one: AttemptReport) -> str:
    """Return the name of an attempt."""
    worker = one.attempt.worker
    number = one.attempt.number
    return f"Attempt {number}" if worker is None else f"Worker {worker}, attempt {number}"


def end(report: RunReport, one: AttemptReport) -> str:
    """Return how an attempt ended, as a short phrase."""
    outcome = one.attempt.outcome
    if not outcome.has_ended:
        return "running" if report.run.outcome == RUNNING else "its end is unknown"
    if outcome.exit_code == 0:
        return "succeeded"
    if not outcome.kind:
        return f"ended, status {outcome.exit_code}"
    return f"failed: {run_facts.failure(outcome)}"


def attempt_facts(one: AttemptReport) -> Labelled:
    """Return the known facts about an attempt, by label; unknown ones are left out."""
    attempt, outcome = one.attempt, one.attempt.outcome
    own = [
        ("started", moment(attempt.started_at)),
        ("lived", "" if attempt.lived_s is None else seconds(attempt.lived_s)),
        ("status", str(outcome.exit_code) if outcome.has_ended else ""),
        ("steps", steps(one)),
        ("trial", "; ".join(_trial(trial) for trial in one.trials)),
        ("last loss", one.loss),
    ]
    return [fact for fact in run_facts.of_attempt(attempt, one.spent, own) if fact[0] not in _APART]


def _trial(trial: Trial) -> str:
    params = trials_view.parameters(trial)
    return f"{trial.number} ended the process{params and f': {params}'}"


def steps(one: AttemptReport) -> str:
    """Return text such as "45 → 75, from step-40.pt"; "" if no step is known."""
    first, last = one.attempt.outcome.first_step, one.last_step
    text = "" if first is None else f"from {first}"
    if last is not None:
        text = f"→ {last}" if first is None or first > last else f"{first} → {last}"
    name = os.path.basename(one.attempt.begun.checkpoint.rstrip("/"))
    return f"{text}, from {name}" if text and name else text or (name and f"from {name}")


def heading(report: RunReport, one: AttemptReport) -> str:
    """Return how an attempt ended; a failure is said in words, since few people know the kinds."""
    outcome = one.attempt.outcome
    words, _ = in_words(one.cause.explanation if one.cause else "")
    return f"{words} ({run_facts.failure(outcome)})" if words else end(report, one)


def explained(one: AttemptReport) -> str:
    """Return what is known about an attempt's failure beyond its heading; "" if nothing."""
    return in_words(one.cause.explanation)[1] if one.cause else ""


# --- Markdown ----------------------------------------------------------------------------------


def as_markdown(report: RunReport) -> str:
    """Return the report as Markdown, short enough for an issue."""
    lines = [f"## {_word(report.headline)}", ""]
    lines += [f"- {label}: {_word(text)}" for label, text in facts_of_run(report) + costs(report)]
    settings = run_facts.settings(report.plan)
    lines += [f"- {label}: {_word(text)}" for label, text in searched(report)]
    lines += [f"- next time: {_word(report.next_time)}"] if report.next_time else []
    lines += [f"- sets: {_code(', '.join(settings))}"] if settings else []
    failed = [one for one in report.attempts if one.attempt.outcome.kind][-_TAILS:]
    for index, one in enumerate(report.attempts):
        if report.left_out and index == FIRST:
            lines += ["", f"{report.left_out} attempts between them are left out."]
        lines += ["", *_attempt(report, one, with_tail=one in failed)]
    found = trials_view.as_text(report.trials, report.replacements)
    lines += ["", *_fenced([line for line in found if line])] if found else []
    return "\n".join(lines)


def _attempt(report: RunReport, one: AttemptReport, *, with_tail: bool) -> Iterator[str]:
    yield f"### {title(one)}: {_word(heading(report, one))}"
    yield ""
    diagnosis = one.attempt.outcome.diagnosis
    if diagnosis.root_line:
        yield f"- deciding line: {_code(diagnosis.root_line)}"
    if diagnosis.user_frame:
        yield f"- your code: {_code(diagnosis.user_frame)}"
    yield from (f"- stack: {_code(frame)}" for frame in diagnosis.stack)
    if one.cause:
        more = " ".join(filter(None, [explained(one), one.cause.advice]))
        yield from [f"- {more}"] if more else []
    for label, text in attempt_facts(one):
        yield f"- {label}: {_word(text)}"
    for change in one.added:
        why = f": {change.why}; cost: {change.cost}" if change.why else ""
        yield f"- mitigation {_word(change.name)}{why}"
    for note in (*one.notes, *one.attempt.hooks):
        yield f"- {_word(note)}"
    for silence in one.hangs:
        yield f"- silent for {seconds(silence.silent_s)}:"
        for place in silence.places:
            at = f", at {place.frame}" if place.frame else ""
            odd = " (not where the others are)" if place.odd else ""
            text = f"rank {place.rank} {place.what}{at}{odd}"
            yield f"  - {_code(text)}"
        yield from [f"  - and {silence.left_out} more ranks"] if silence.left_out else []
    for row in one.ranks.rows:
        if row.error:
            yield f"- exception of {row.ranks}: {_code(row.error)}"
    if with_tail and one.tails:
        deciding = [tail for tail in one.tails if any(row.decides for row in tail.rows)]
        yield ""
        yield from _fenced(list(_tail((deciding or one.tails)[-1])))


def _tail(tail: Excerpt) -> Iterator[str]:
    yield f"end of {tail.stream}"
    for fold, rows in blocks(tail):
        if fold:
            yield f"   ... {len(rows)} lines: {fold}"
            continue
        for row in rows:
            yield from _row(row)


def blocks(tail: Excerpt) -> list[tuple[str, list[Row]]]:
    """Return the rows of a tail in groups, each with the title under which it is folded, or ""."""
    groups = itertools.groupby(tail.rows, key=lambda row: row.fold)
    return [(fold, list(rows)) for fold, rows in groups]


def _row(row: Row) -> Iterator[str]:
    if row.skipped:
        yield f"   ... {row.skipped} lines left out"
    yield f"{'>> ' if row.decides else '   '}{shown(row.text)[:_LINE_CHARS]}"


def _word(text: str) -> str:
    """Return text unchanged if it cannot be markup, else as code."""
    return shown(text) if _PLAIN.fullmatch(text) and len(text) < CHARS else _code(text)


def _code(text: str) -> str:
    """Return a code span that no backtick in the text can close."""
    clean = shown(" ".join(text.split()))
    ticks = "`" * (1 + max(map(len, re.findall("`+", clean)), default=0))
    space = " " if clean.startswith("`") or clean.endswith("`") else ""
    return f"{ticks}{space}{clean}{space}{ticks}"


def _fenced(lines: list[str]) -> list[str]:
    clean = [printable(line, kept="\t") for line in lines]
    longest = max((len(run) for line in clean for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *clean, fence]
