"""A run as one value for its report, from the journal: what happened, why, and its cost.

The amount shown is limited, whatever the journal contains; what is left out is counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saferun.base import files
from saferun.base.durations import seconds
from saferun.diagnosis import signatures
from saferun.diagnosis.explaining import failure_report
from saferun.diagnosis.places import Place
from saferun.diagnosis.reading import progress
from saferun.diagnosis.signatures import Kind
from saferun.inject import contract
from saferun.journal import (
    events,
    mitigation_history,
    rank_files,
    reader,
    receipts,
    run_notes,
    time_spent,
    trials,
)
from saferun.journal.attempts import RecordedAttempt, attempts, directory, on_rank
from saferun.journal.event_types import HangSeen
from saferun.journal.rank_report import Ranks, ranks
from saferun.journal.reader import RecordedPlan, Run, read_plan
from saferun.journal.run_notes import Notes
from saferun.journal.tail_excerpt import Excerpt, excerpt
from saferun.journal.time_spent import Spent, Times
from saferun.journal.training_steps import Point, Steps
from saferun.journal.trials import Trial
from saferun.planning import mitigation_catalog
from saferun.planning.mitigation_catalog import Mitigation

FIRST, _LAST = 5, 25  # attempts that are shown of a longer run
_PLACES, _STACKS = 16, 8  # ranks of a hang, and ranks with stacks
_STACK_CHARS = 6000  # longest stack
_STACKS_FILE = re.compile(r"hang-\d{1,4}\.txt", re.ASCII)
_HOUR_S = 3600.0
_SHOWN_S = 0.05  # shorter times are shown as 0
_WORTH_SAVING_S = 60.0  # repeated work because nothing was saved
_NAMED = 3  # kinds of failures in the headline


@dataclass(frozen=True, slots=True)
class Cause:
    """The knowledge about a kind of failure."""

    explanation: str
    advice: str
    references: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A mitigation that an attempt has and the previous one did not have."""

    name: str
    sets: str
    cost: str
    why: str


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence of the job that was too long, and where its ranks were."""

    silent_s: float
    places: tuple[Place, ...]
    left_out: int  # ranks
    stacks: tuple[tuple[str, str], ...]  # (whose, text)


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One attempt."""

    attempt: RecordedAttempt
    begins_s: float  # seconds since the start of the run
    spent: Spent
    last_step: int | None
    loss: str
    steps: Steps
    saved: tuple[Point, ...]  # checkpoints that are known to have been written in it
    cause: Cause | None
    added: tuple[Change, ...]
    ranks: Ranks
    tails: tuple[Excerpt, ...]
    hangs: tuple[Silence, ...]
    trials: tuple[Trial, ...]  # trials that ended its process
    notes: tuple[str, ...]  # notes on the machine, the nodes, and faults of saferun itself


@dataclass(frozen=True, slots=True)
class Library:
    """saferun's knowledge about the terms in a journal."""

    kinds: Mapping[str, Kind]
    mitigations: Mapping[str, Mitigation]


@dataclass(frozen=True, slots=True)
class Amount:
    """The cost of a part of a run's time on this machine."""

    s: float
    gpu_hours: float
    money: float | None  # None without a price


@dataclass(frozen=True, slots=True)
class Cost:
    """The resources that a run has used on this machine, by purpose."""

    gpus: int  # 0 if it had none, or if unknown
    price_per_gpu_hour: float | None
    used: Amount  # the sum of the next three
    useful: Amount
    done_again: Amount
    starts_and_waits: Amount
    lost: Amount  # the part of `done_again` that no attempt has done again


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run."""

    headline: str
    run: Run
    plan: RecordedPlan
    versions: tuple[str, ...]  # of saferun and torch in the last attempt
    gpu_names: tuple[str, ...]
    cost: Cost
    attempts: tuple[AttemptReport, ...]
    left_out: int  # number of attempts after the first ones shown (FIRST)
    replaced: int  # attempts whose process asked to be replaced; they are not shown
    hosts: tuple[str, ...]  # one for each node
    trials: tuple[Trial, ...]
    replacements: Mapping[str, int]  # reason -> count
    made_at: float
    next_time: str  # what to change, or what saferun will change; "" for nothing


def read_report(run: Run, now_s: float, price: float | None = None) -> RunReport:
    """Return the report of a run.

    Args:
        run: the run, as read from its journal.
        now_s: seconds since the epoch.
        price: the price of a GPU for an hour; None: the price in the run's profile.
    """
    log = events.read(run.path)
    every = attempts(run)
    times = time_spent.read(run, every, now_s)
    parts = zip(every, times.attempts, strict=True)
    kept = [(one, spent) for one, spent in parts if not one.replaced]
    tried = [one for one, _ in kept]
    noted = run_notes.read(log)
    finished = trials.read(run.path)
    library = Library(signatures.load().kinds, mitigation_catalog.load())
    shown = _shown(len(tried))
    reports = [_attempt(run, tried, at, kept[at][1], noted, library, finished) for at in shown]
    cost, plan = _cost(every, times, price, noted), read_plan(run.path)
    return RunReport(
        headline=_headline(run, kept, cost, library, finished),
        run=run,
        plan=plan,
        versions=noted.begun.versions if noted.begun else (),
        gpu_names=noted.begun.gpu_names if noted.begun else (),
        cost=cost,
        attempts=tuple(reports),
        left_out=len(tried) - len(shown),
        replaced=len(every) - len(tried),
        hosts=noted.hosts,
        trials=finished,
        replacements=trials.replaced(run.path),
        made_at=now_s,
        next_time=_next_time(run, kept, plan, library, noted),
    )


def _shown(count: int) -> list[int]:
    if count <= FIRST + _LAST:
        return list(range(count))
    return [*range(FIRST), *range(count - _LAST, count)]


# --- one attempt -------------------------------------------------------------------------------


def _attempt(
    run: Run,
    tried: Sequence[RecordedAttempt],
    at: int,
    spent: Spent,
    noted: Notes,
    library: Library,
    finished: Sequence[Trial],
) -> AttemptReport:
    one = tried[at]
    follows = at > 0 and tried[at - 1].worker == one.worker
    known = library.kinds.get(one.outcome.kind)
    key, line = (one.worker, one.number), one.outcome.diagnosis.root_line
    place = directory(run, one)
    own = os.path.join(place, "receipts")
    tails = [(path.rpartition(".")[2], files.read(path, 1 << 20)) for path, _ in one.tails]
    if [stream for stream, _ in tails] == ["stdout"]:  # both streams, if they share one pipe
        tails = [("output", tails[0][1])]
    left = receipts.read(own, one.number)
    ended = [trial for trial in finished if trials.ended_its_process(trial)]
    ready_s = spent.starts_and_waits_s - spent.waited_s
    end_s = ready_s + spent.useful_s + spent.done_again_s
    made = time_spent.steps_of(run, one, ready_s, end_s)
    return AttemptReport(
        attempt=one,
        begins_s=max(0.0, (one.started_at or 0.0) - (run.started_at or one.started_at or 0.0)),
        spent=spent,
        last_step=made.last,
        loss=next((loss for _, data in tails if (loss := progress.last_loss(data))), ""),
        steps=made,
        saved=_saved(one, made, end_s),
        cause=known and Cause(known.explanation, known.advice, known.references),
        added=_added(one, tried[at - 1] if follows else None, library.mitigations),
        ranks=ranks(left, rank_files.failures(own, one.number)),
        tails=tuple(excerpt(stream, data, line) for stream, data in tails if data.strip()),
        hangs=tuple(_silence(place, one.number, hang) for hang in noted.hangs.get(key, ())),
        trials=tuple(trial for trial in ended if trials.ran_in(trial, one.number, one.worker)),
        notes=tuple(noted.lines.get(key, ())),
    )


def _saved(one: RecordedAttempt, made: Steps, end_s: float) -> tuple[Point, ...]:
    """Return the checkpoints on disk at its end; else the last one before its failure."""
    lost = one.outcome.lost_work
    found = [(saved.s, saved.step) for saved in one.outcome.saved]
    if not found and lost is not None and lost.checkpoint and lost.s <= end_s:
        found = [(end_s - lost.s, None)]
        if lost.steps is not None and made.last is not None:
            found = [(end_s - lost.s, max(0, made.last - lost.steps))]
    points = []
    for s, named in found:
        before = max((point.step for point in made.points if point.s <= s), default=None)
        step = before if named is None else named
        if step is not None and made.points:
            points.append(Point(s, step))
    return tuple(points)


def _added(
    one: RecordedAttempt, before: RecordedAttempt | None, catalog: Mapping[str, Mitigation]
) -> tuple[Change, ...]:
    known = before.begun.mitigations if before else ()
    names = [name for name in one.begun.mitigations if name not in known]
    return tuple(
        Change(name, mitigation_catalog.sets(catalog[name]), catalog[name].cost, catalog[name].why)
        if name in catalog
        else Change(name, "", "", "")
        for name in names
    )


# --- hangs -------------------------------------------------------------------------------------


def _silence(place: str, number: int, hang: HangSeen) -> Silence:
    by_oddness = sorted(hang.ranks, key=lambda rank: not rank.odd)
    stacks = []
    if hang.stacks and _STACKS_FILE.fullmatch(hang.stacks):
        file = os.path.join(place, hang.stacks)
        stacks.append(("all processes, by py-spy", files.read(file, 1 << 20)))
    for one in by_oddness[:_STACKS]:
        rank = "none" if one.rank is None else one.rank
        name = f"a{number}-r0-rank{rank}-pid{one.pid}{contract.STACKS}"
        whose = "the job" if one.rank is None else f"rank {one.rank}"
        stacks.append((whose, files.read(os.path.join(place, "receipts", name), 1 << 20)))
    texts = tuple(
        (whose, data.decode("utf-8", "replace").strip()[-_STACK_CHARS:])
        for whose, data in stacks
        if data.strip()
    )
    shown = tuple(by_oddness[:_PLACES])
    return Silence(hang.silent_s, shown, len(hang.ranks) - len(shown), texts)


# --- the whole run -----------------------------------------------------------------------------


def _cost(
    every: Sequence[RecordedAttempt], times: Times, price: float | None, noted: Notes
) -> Cost:
    gpus = len(noted.worker_gpus) or max((one.begun.gpus or 0 for one in every), default=0)
    if price is None:
        prices = (one.begun.price_per_gpu_hour for one in reversed(every))
        price = next((price for price in prices if price is not None), 0)

    def amount(part_s: float) -> Amount:
        hours = part_s * gpus / _HOUR_S
        return Amount(part_s, hours, hours * price if gpus and price else None)

    return Cost(
        gpus=gpus,
        price_per_gpu_hour=price or None,
        used=amount(times.took_s),
        useful=amount(times.whole.useful_s),
        done_again=amount(times.whole.done_again_s),
        starts_and_waits=amount(times.whole.starts_and_waits_s),
        lost=amount(times.whole.lost_s),
    )


def _headline(
    run: Run,
    kept: Sequence[tuple[RecordedAttempt, Spent]],
    cost: Cost,
    library: Library,
    finished: Sequence[Trial],
) -> str:
    """Return the run as one sentence: its end, the reason, and the cost of the failures."""
    tried = [one for one, _ in kept]
    last = tried[-1] if tried else None
    number = last.number if last else 0
    where = "at the first attempt" if number == 1 else f"at attempt {number}"
    if last is not None and last.worker is not None:
        where = f"with {len({one.worker for one in tried})} workers, {len(tried)} attempts"
    if finished:
        where = f"with {trials.headline(finished, 0, 0)}"
    ended = {
        reader.OK: "Finished",
        reader.FAILED: "Failed",
        reader.RUNNING: "Running",
        reader.INTERRUPTED: "Interrupted",
    }.get(run.outcome, "Its end is unknown")
    known = number and run.outcome in (*reader.FINISHED, reader.RUNNING)
    text = f"{ended} {where}" if known or finished else ended
    if run.kind:
        text += f": {_sentence(run.kind, last, library)}"
    kinds = list(dict.fromkeys(one.outcome.kind for one in tried if one.outcome.kind))
    if not kinds:
        return text
    named = ", ".join(kinds[:_NAMED]) + (", …" if len(kinds) > _NAMED else "")
    after = f" after {named}" if run.outcome != reader.FAILED or len(kinds) > 1 else ""
    return f"{text}; {_again(cost)}{after}"


def _again(cost: Cost) -> str:
    """Return the work that was repeated, and the work that is lost."""
    lost_s, used = cost.lost.s, seconds(cost.used.s)
    done_s = cost.done_again.s - lost_s
    if cost.done_again.s < _SHOWN_S:
        return "no work lost"
    if lost_s < _SHOWN_S:
        return f"{seconds(done_s)} of {used} done again"
    if done_s < _SHOWN_S:
        return f"{seconds(lost_s)} of {used} lost"
    return f"{seconds(done_s)} of {used} done again, another {seconds(lost_s)} lost"


def _sentence(kind: str, last: RecordedAttempt | None, library: Library) -> str:
    """Return a kind of failure in words, with its name, which few people know."""
    rank = "" if last is None else on_rank(last.outcome)
    known = library.kinds.get(kind)
    first, _ = failure_report.in_words(known.explanation if known else "")
    return f"{first} ({kind}{rank})" if first else f"{kind}{rank}"


def _next_time(
    run: Run,
    tried: Sequence[tuple[RecordedAttempt, Spent]],
    plan: RecordedPlan,
    library: Library,
    noted: Notes,
) -> str:
    """Return what the next run can do better; "" if nothing is known."""
    kinds = {one.outcome.kind for one, _ in tried}
    found = []
    if "port-in-use" in kinds and "--standalone" not in plan.command:
        found.append("Give --standalone, which takes a free port, if the job has one node.")
    if names := _remembered(run, plan):
        costs = {library.mitigations[name].cost for name in names if name in library.mitigations}
        cost = f" (cost: {'; '.join(sorted(costs))})" if costs else ""
        found.append(f"The run starts with {', '.join(names)}, which helped here{cost}.")
    unsaved = sum(spent.done_again_s for _, spent in tried if spent.why in time_spent.UNSAVED)
    if noted.advice:
        found.append(f"{noted.advice[:1].upper()}{noted.advice[1:]}.")
    elif unsaved >= _WORTH_SAVING_S:
        found.append(
            "Have the job save checkpoints, and name them in retry.resume: a retry goes on from "
            "the newest one."
        )
    return " ".join(found)


def _remembered(run: Run, plan: RecordedPlan) -> list[str]:
    """Return the mitigations of a run that the history has stored for the next one."""
    since = (run.started_at or run.last_at) - mitigation_history.KEPT_S
    script = os.path.basename(plan.script)
    kept = {
        entry.mitigation
        for entry in mitigation_history.load(os.environ)
        if entry.at >= since and os.path.basename(entry.key.script) == script
    }
    return [name for name in run.mitigations if name in kept and run.outcome == reader.OK]
