"""Pure: notes in a journal besides the attempts: hangs, nodes, GPUs, faults of saferun itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.errors import OWN_FAULT
from saferun.journal import event_types
from saferun.journal.event_types import AttemptBegun, HangSeen, Stall
from saferun.journal.events import Event
from saferun.model import OK

_LINES = 12  # most lines for one attempt
_HANGS = 4
_HOSTS = 256

Key = tuple["int | None", int]  # worker and attempt


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of a journal, for each attempt and for the whole run."""

    lines: dict[Key, list[str]]
    hangs: dict[Key, list[HangSeen]]
    hosts: tuple[str, ...]
    worker_gpus: frozenset[str]  # UUIDs
    begun: AttemptBegun | None  # the last attempt
    advice: str  # the run's advice on how often the job should save


def read(log: Sequence[Event]) -> Notes:
    """Return the notes; a note between two attempts belongs to the later one."""
    lines: dict[Key, list[str]] = {}
    hangs: dict[Key, list[HangSeen]] = {}
    hosts: dict[str, str] = {}  # node -> host
    gpus: set[str] = set()
    begun, advice = None, ""
    stalls: dict[int | None, Stall] = {}  # worker -> last stall
    numbers: dict[int | None, int] = {}  # worker -> the running or next attempt
    for event in log:
        facts, worker = event.facts, event.worker
        number = numbers.get(worker, 1)
        if isinstance(facts, AttemptBegun):
            numbers[worker], begun = facts.attempt, facts
        elif isinstance(facts, AttemptOutcome):
            numbers[worker] = facts.number + 1
            stall = stalls.pop(worker, None)
            # Where the line is evidence, the job ended of the stall.
            if stall and any(stall.line in by for by in facts.diagnosis.decided_by):
                silence = HangSeen(stall.silent_s, stall.ranks, None)
                hangs.setdefault((worker, number), []).append(silence)
        elif isinstance(facts, event_types.WorkerBegun) and facts.gpu:
            gpus.add(facts.gpu)
        elif isinstance(facts, HangSeen):
            hangs.setdefault((worker, number), []).append(facts)
        elif isinstance(facts, Stall) and facts.line:
            stalls[worker] = facts
        elif isinstance(facts, event_types.RunEnded):
            advice = advice or facts.advice
        if isinstance(facts, event_types.NodesMet):
            hosts = facts.hosts or hosts
            number = facts.attempt
        lines.setdefault((worker, number), []).extend(_lines(event))
    return Notes(
        {key: found[:_LINES] for key, found in lines.items()},
        {key: found[:_HANGS] for key, found in hangs.items()},
        tuple(hosts.values())[:_HOSTS],
        frozenset(gpus),
        begun,
        advice,
    )


def _lines(event: Event) -> Iterator[str]:
    facts = event.facts
    if isinstance(facts, (event_types.Preflight, event_types.Recovery)):
        what = "GPU test" if isinstance(facts, event_types.Preflight) else "recovery"
        for one in facts.findings:
            if one.level != OK:
                yield f"{what}: {one.area}: {one.what}" + (f" ({one.fix})" if one.fix else "")
    elif isinstance(facts, event_types.NodesMet):
        host = facts.root.get("host") if facts.root else None  # a report of any version
        if isinstance(host, str):
            yield f"the nodes agreed that the failure began on {host}"
        if facts.why:
            yield f"the nodes do not fit: {facts.why}"
    elif isinstance(facts, (event_types.LossLost, event_types.SlowRank)):
        yield facts.line
    elif isinstance(facts, event_types.Fault):
        yield f"{OWN_FAULT}: {facts.what}"
