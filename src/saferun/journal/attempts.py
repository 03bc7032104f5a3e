"""The attempts of one run, as far as its journal tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from saferun.diagnosis.reading import crash_stack
from saferun.diagnosis.work_lost import WorkLost
from saferun.inject import contract
from saferun.journal import events, receipts
from saferun.journal.event_types import AttemptBegun, AttemptEnded, PlanChanged, Recycled
from saferun.journal.events import Event
from saferun.journal.reader import RecordedPlan, Run, read_plan, recorded
from saferun.named_tuple import NamedTuple
from saferun.planning.own_variables import OF_ATTEMPT


class Attempt(NamedTuple):
    """One attempt of a run."""

    number: int
    worker: int | None = None  # of several
    started_at: float | None = None  # seconds since the epoch
    ready_at: float | None = None  # when all its ranks had met; None where that is not known
    lived_s: float | None = None
    status: int | None = None
    ended_by: str = ""  # "job", "grace", "interrupt", "keeper"
    kind: str = ""
    rank: int | None = None  # that failed first
    line: str = ""  # that decided, without its particulars where the journal has no other
    decided_by: tuple[str, ...] = ()  # the evidence of it
    stack: tuple[str, ...] = ()  # of Python where compiled code crashed, the innermost frame first
    user_frame: str = ""  # where the user's code was, as `train.py:28  batch["labels"]`
    mitigations: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # against the attempt before it
    action: str = ""  # what was decided: "again", "stop", "done"
    reason: str = ""
    delay_s: float = 0.0
    signals: tuple[str, ...] = ()  # that were passed on to it
    killed: int = 0  # processes that had to be killed
    unkillable: tuple[int, ...] = ()  # pids
    lost: WorkLost | None = None  # the work since the last checkpoint, where it is known
    tails: tuple[tuple[str, int], ...] = ()  # (path, bytes)
    hooks: tuple[str, ...] = ()  # messages about the hooks in it
    left: int | None = None  # attempts that can follow it without progress
    untried: tuple[str, ...] = ()  # mitigations of its kind that nothing has tried
    replaced: bool = False  # its process asked for another one in its place
    first_step: int | None = None  # of the training, where its output reports steps
    gpus: int | None = None  # of this machine
    price_per_gpu_hour: float | None = None  # as its profile has it


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
            before, plan = plan, recorded(facts.plan)
        elif isinstance(facts, AttemptBegun):
            number = facts.attempt
            changed = changes(before, plan)
            found[number] = Attempt(
                number,
                worker,
                started_at=event.at,
                mitigations=facts.mitigations,
                changed=changed,
                left=facts.left,
                gpus=facts.gpus,
                price_per_gpu_hour=facts.price_per_gpu_hour,
            )
            before = plan
        elif event.name == "started" and number in found:
            found[number] = found[number]._replace(started_at=event.at)
        elif isinstance(facts, Recycled) and number in found:
            found[number] = found[number]._replace(replaced=True)
        elif isinstance(facts, AttemptEnded):
            number = facts.attempt
            found[number] = _ended(found.get(number) or Attempt(number, worker), facts)
    injected = contract.VARIABLE in plan.env
    return [_with_files(path, found[number], injected) for number in sorted(found)]


def _ended(attempt: Attempt, facts: AttemptEnded) -> Attempt:
    failed = facts.status != 0 and bool(facts.kind)  # of a success the kind is "no-failure"
    line = facts.root_line or facts.fingerprint.partition(":")[2].strip()  # behind the kind
    return attempt._replace(
        lived_s=facts.lived_s,
        status=facts.status,
        ended_by=facts.ended_by,
        kind=facts.kind if failed else "",
        rank=facts.root_rank,
        line=line if failed else "",
        decided_by=facts.decided_by if failed else (),
        stack=facts.stack[: crash_stack.MOST],
        user_frame=facts.user_frame if failed else "",
        action=facts.action,
        reason=facts.reason,
        delay_s=facts.delay_s,
        signals=facts.signals,
        killed=facts.killed,
        unkillable=facts.unkillable,
        lost=facts.lost_work,
        untried=facts.untried,
        first_step=facts.first_step,
    )


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
    return attempt._replace(tails=tuple(tails), hooks=hooks, ready_at=receipts.met_at(left))


def changes(before: RecordedPlan, after: RecordedPlan) -> tuple[str, ...]:
    """Return what a later attempt's plan sets otherwise, as text for people."""
    if not before.raw or not after.raw:
        return ()  # one of them was not written
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
