"""The attempts of one run, as far as its journal tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from saferun.inject import contract
from saferun.journal import events, receipts
from saferun.journal.events import AttemptBegun, AttemptEnded, Event, PlanChanged
from saferun.journal.reader import Run, read_plan
from saferun.named_tuple import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Attempt(NamedTuple):
    """One attempt of a run."""

    number: int
    worker: int | None = None  # of several
    started_at: float | None = None  # seconds since the epoch
    lived_s: float | None = None
    status: int | None = None
    ended_by: str = ""  # "job", "grace", "interrupt", "keeper"
    kind: str = ""
    rank: int | None = None  # that failed first
    line: str = ""  # that decided, without its particulars where the journal has no other
    decided_by: tuple[str, ...] = ()  # the evidence of it
    mitigations: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # against the attempt before it
    action: str = ""  # what was decided: "again", "stop", "done"
    reason: str = ""
    delay_s: float = 0.0
    signals: tuple[str, ...] = ()  # that were passed on to it
    killed: int = 0  # processes that had to be killed
    unkillable: tuple[int, ...] = ()  # pids
    lost: Mapping[str, Any] = {}  # the work since the last checkpoint, where it is known
    tails: tuple[tuple[str, int], ...] = ()  # (path, bytes)
    hooks: tuple[str, ...] = ()  # messages about the hooks in it
    replaced: bool = False  # its process asked for another one in its place


def attempts(run: Run) -> list[Attempt]:
    """Return the attempts of a run, in order, with what they left on the disk.

    Those of each worker stand together.
    """
    log = events.read(run.path)
    workers = sorted({event.worker for event in log if event.worker is not None})
    if not workers:
        return _attempts(run.path, log, None)
    parts = ([event for event in log if event.worker == worker] for worker in workers)
    pairs = zip(workers, parts, strict=True)
    return [one for w, part in pairs for one in _attempts(f"{run.path}/worker-{w}", part, w)]


def _attempts(path: str, log: Sequence[Event], worker: int | None) -> list[Attempt]:
    """Return the attempts whose files lie in one directory."""
    found: dict[int, Attempt] = {}
    plan = before = read_plan(path)
    number = 0
    for event in log:
        facts = event.facts
        if isinstance(facts, PlanChanged):
            before, plan = plan, facts.plan
        elif isinstance(facts, AttemptBegun):
            number = event.attempt or 0
            changed = changes(before, plan)
            found[number] = Attempt(
                number, worker, event.at, mitigations=facts.mitigations, changed=changed
            )
            before = plan
        elif event.name == "started" and number in found:
            found[number] = found[number]._replace(started_at=event.at)
        elif event.name == "recycled" and number in found:
            found[number] = found[number]._replace(replaced=True)
        elif isinstance(facts, AttemptEnded):
            number = event.attempt or 0
            found[number] = _ended(found.get(number) or Attempt(number, worker), event, facts)
    injected = contract.VARIABLE in events.mapping(plan.get("env"))
    return [_with_files(path, found[number], injected) for number in sorted(found)]


def _ended(attempt: Attempt, event: Event, facts: AttemptEnded) -> Attempt:
    known = facts._asdict()
    if event.status == 0 or not facts.kind:  # of a success the kind is "no-failure"
        known.update(kind="", line="", decided_by=())
    return attempt._replace(status=event.status, reason=event.reason, **known)


def _with_files(path: str, attempt: Attempt, injected: bool) -> Attempt:
    tails = []
    for stream in ("stdout", "stderr"):
        file = os.path.join(path, f"attempt-{attempt.number}.{stream}")
        try:
            tails.append((file, os.lstat(file).st_size))
        except OSError:
            continue
    left = receipts.read(os.path.join(path, "receipts"), attempt.number)
    # Whether ranks ran unguarded was known to the run alone, which has reported it.
    hooks = receipts.judge(left, expects_hooks=injected, ranks_ran=False, no_python=True)
    return attempt._replace(tails=tuple(tails), hooks=hooks)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a later attempt's plan sets otherwise, as text for people."""
    from saferun.plan.own_variables import OF_ATTEMPT

    if not before or not after:
        return ()  # one of them was not written
    old, new = (events.mapping(plan.get("env")) for plan in (before, after))
    skipped = {contract.VARIABLE, *OF_ATTEMPT}
    values = [{n: events.mapping(s).get("value") for n, s in env.items()} for env in (old, new)]
    names = [name for name in {**old, **new} if name not in skipped]
    found = [_change(n, *(v.get(n) for v in values)) for n in names]
    trees = [dict(_leaves("hooks", events.mapping(p.get("hooks")))) for p in (before, after)]
    found += [_change(key, *(tree.get(key) for tree in trees)) for key in {**trees[0], **trees[1]}]
    argv = events.strings(before.get("command"))
    found += [f"argument {w}" for w in events.strings(after.get("command")) if w not in argv]
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
