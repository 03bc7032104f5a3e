"""The attempts of one run, read from its journal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.reading import crash_stack
from saferun.inject import contract
from saferun.journal import event_types, events, receipts
from saferun.journal.event_types import AttemptBegun
from saferun.journal.events import Event
from saferun.journal.reader import RecordedPlan, Run, read_plan, recorded
from saferun.planning.own_variables import OF_ATTEMPT


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """One attempt of a run, with its files on disk."""

    begun: AttemptBegun
    outcome: AttemptOutcome
    worker: int | None = None  # number of the worker, if there are several
    started_at: float | None = None  # seconds since the epoch
    ready_at: float | None = None  # when all its ranks had met; None if unknown
    changed: tuple[str, ...] = ()  # differences from the previous attempt
    tails: tuple[tuple[str, int], ...] = ()  # (path, bytes)
    hooks: tuple[str, ...] = ()  # messages about its hooks
    ranks_started: str = ""  # how ranks were started, if they may be warm
    loss: str = ""  # message of the watch on its loss
    slow: str = ""  # message of the watch for a slow rank
    replaced: bool = False  # its process asked to be replaced

    @property
    def number(self) -> int:
        """Return the number of the attempt, from 1 on."""
        return self.begun.attempt

    @property
    def lived_s(self) -> float | None:
        """Return the seconds from its start to its end; None if it runs or its end is unknown."""
        return self.outcome.lived_s if self.outcome.has_ended else None


def directory(run: Run, one: RecordedAttempt) -> str:
    """Return the directory of an attempt's files: the run's directory, or its worker's."""
    return run.path if one.worker is None else os.path.join(run.path, f"worker-{one.worker}")


def on_rank(outcome: AttemptOutcome) -> str:
    """Return " on rank 3" for the rank that failed first; "" if unknown."""
    return "" if outcome.root_rank is None else f" on rank {outcome.root_rank}"


def attempts(run: Run) -> list[RecordedAttempt]:
    """Return the attempts of a run, in order, with their files on disk.

    The attempts of each worker stand together.
    """
    log = events.read(run.path)
    workers = sorted({event.worker for event in log if event.worker is not None})
    if not workers:
        return _attempts(run.path, log, None)
    parts = ([event for event in log if event.worker == worker] for worker in workers)
    pairs = zip(workers, parts, strict=True)
    return [one for w, part in pairs for one in _attempts(f"{run.path}/worker-{w}", part, w)]


def _attempts(path: str, log: Sequence[Event], worker: int | None) -> list[RecordedAttempt]:
    """Return the attempts whose files lie in one directory."""
    found: dict[int, RecordedAttempt] = {}
    plan = before = read_plan(path)
    number = 0
    for event in log:
        facts = event.facts
        if isinstance(facts, event_types.PlanChanged):
            before, plan = plan, recorded(facts.plan)
        elif isinstance(facts, AttemptBegun):
            number = facts.attempt
            running = AttemptOutcome(number, diagnosis=Diagnosis(""))
            changed = changes(before, plan)
            found[number] = RecordedAttempt(facts, running, worker, event.at, changed=changed)
            before = plan
        elif isinstance(facts, event_types.JobStarted) and number in found:
            found[number] = replace(found[number], started_at=event.at)
        elif isinstance(facts, event_types.LossLost) and number in found:
            found[number] = replace(found[number], loss=facts.line)
        elif isinstance(facts, event_types.SlowRank) and number in found:
            found[number] = replace(found[number], slow=facts.line)
        elif isinstance(facts, event_types.Recycled) and number in found:
            found[number] = replace(found[number], replaced=True)
        elif isinstance(facts, AttemptOutcome):
            number = facts.number
            unknown = RecordedAttempt(AttemptBegun(number, (), None), facts, worker)
            found[number] = replace(found.get(number, unknown), outcome=_bounded(facts))
    injected = contract.VARIABLE in plan.env
    return [_with_files(path, found[number], injected) for number in sorted(found)]


def _bounded(outcome: AttemptOutcome) -> AttemptOutcome:
    """Return an outcome for display: no kind of failure for a success, and a short stack."""
    found = outcome.diagnosis
    kind = "" if outcome.exit_code == 0 else found.kind
    shown = found._replace(kind=kind, stack=found.stack[: crash_stack.MOST])
    return outcome._replace(diagnosis=shown)


def _with_files(path: str, attempt: RecordedAttempt, injected: bool) -> RecordedAttempt:
    tails = []
    for stream in ("stdout", "stderr"):
        file = os.path.join(path, f"attempt-{attempt.number}.{stream}")
        try:
            tails.append((file, os.lstat(file).st_size))
        except OSError:
            continue
    left = receipts.read(os.path.join(path, "receipts"), attempt.number)
    # Only the run itself knew whether ranks ran unguarded, and it has reported that.
    hooks = receipts.judge(left, expects_hooks=injected, ranks_ran=False, no_python=True)
    return replace(
        attempt,
        tails=tuple(tails),
        hooks=hooks,
        ready_at=receipts.met_at(left),
        ranks_started=receipts.started(left),
    )


def changes(before: RecordedPlan, after: RecordedPlan) -> tuple[str, ...]:
    """Return the differences in a later attempt's plan, as text for people."""
    if not before.raw or not after.raw:
        return ()  # one of the plans was not written
    skipped = {contract.VARIABLE, *OF_ATTEMPT}
    names = [name for name in {**before.env, **after.env} if name not in skipped]
    found = [_change(name, before.env.get(name), after.env.get(name)) for name in names]
    old, new = (dict(_leaves("hooks", plan.hooks)) for plan in (before, after))
    found += [_change(key, old.get(key), new.get(key)) for key in {**old, **new}]
    found += [f"argument {word}" for word in after.command if word not in before.command]
    return tuple(filter(None, found))


def _change(name: str, old: object, new: object) -> str:
    if old == new:
        return ""
    return f"{name} no longer set" if new is None else f"{name}={new}"


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value
