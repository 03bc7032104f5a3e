"""The events of a run: input of the writer and result of the reader, one type for each kind.

The fields stand in a line of events.jsonl under their names, in their order. A line of an
AttemptOutcome has the names in _OF_OUTCOME: fields of its diagnosis and decision stand among its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.places import Place
from saferun.inject.node.node_agreement import NodeReport
from saferun.model import Finding, as_tree
from saferun.system.procfs import ProcessRecord


class AttemptBegun(NamedTuple):
    """An attempt is about to start."""

    attempt: int
    mitigations: tuple[str, ...]
    by: ProcessRecord | None  # saferun's process; None if missing
    left: int | None = None  # attempts that can follow without progress; None: unknown
    gpus: int | None = None  # GPUs of this machine that the job sees; None if unknown
    price_per_gpu_hour: float | None = None  # from the profile
    versions: tuple[str, ...] = ()  # "saferun 1.0.0", "torch 2.13.0+cpu"
    gpu_names: tuple[str, ...] = ()  # each name once
    checkpoint: str = ""  # the checkpoint from which `retry.resume` continues


class WorkersBegun(NamedTuple):
    """The workers of a run are about to start."""

    count: int  # type: ignore[assignment]  # the word on disk; a tuple has a method of that name
    by: ProcessRecord | None  # as in AttemptBegun


class WorkerBegun(NamedTuple):
    """The supervisor of one worker has started."""

    supervisor: int  # pid
    gpu: str | None  # UUID


class JobStarted(NamedTuple):
    """The processes of an attempt have started."""

    keeper: int  # pid
    launcher: int  # pid


class Preflight(NamedTuple):
    """The GPUs were tested before an attempt."""

    granted: bool
    findings: tuple[Finding, ...]


class Recovery(NamedTuple):
    """A recovery of the GPUs was made after a failure."""

    findings: tuple[Finding, ...]


class NodesMet(NamedTuple):
    """The nodes of a run agreed on an attempt: inject/node/node_agreement.Agreement."""

    action: str
    attempt: int  # the attempt for which they met
    mitigations: list[str]
    root: NodeReport | None
    why: str
    hosts: dict[str, str]
    beats: bool


class HangSeen(NamedTuple):
    """A job was silent for too long."""

    silent_s: float
    ranks: tuple[Place, ...]
    stacks: str | None  # a file in the run's directory


class Stall(NamedTuple):
    """Ranks wait for a silent rank; without a line, they wait no more."""

    line: str  # who waits for whom, for people
    silent_s: float
    ranks: tuple[Place, ...]


class LossLost(NamedTuple):
    """A training's loss is not a number any more, as in diagnosis/evidence.NoNumber."""

    line: str  # for people
    value: str
    step: int | None
    good: str
    good_step: int | None
    checkpoint: str | None  # the run's newest one from before that


class SlowRank(NamedTuple):
    """The others wait for one rank in nearly every collective, as in diagnosis/slow_rank.Slow."""

    line: str  # for people
    rank: int
    share: float  # part of the job's time that it costs
    collectives: int  # number of compared ones
    facts: tuple[str, ...]  # differences of its GPU and CPU from the others'


class Recycled(NamedTuple):
    """The process of an attempt is replaced at its own request, as in recycling.ReplaceRequest."""

    attempt: int
    why: str
    kind: str
    progress: int


class PlanChanged(NamedTuple):
    """The plan of a later attempt, in the form of planning/view.as_json."""

    plan: dict[str, Any]


class Fault(NamedTuple):
    """A fault of saferun itself; the job continues."""

    what: str
    traceback: str


class RunEnded(NamedTuple):
    """The run, or one of its workers, has ended."""

    status: int | None  # exit status; None after a fault of saferun itself
    reason: str
    advice: str = ""  # how often the job should save
    asked: bool = False  # a signal from outside ended it


EventFacts: TypeAlias = tuple[Any, ...]  # a named tuple of one of these types
NAMES: dict[type[EventFacts], str] = {
    AttemptBegun: "attempt",
    WorkersBegun: "workers",
    WorkerBegun: "worker",
    JobStarted: "started",
    Preflight: "preflight",
    Recovery: "recovery",
    NodesMet: "nodes",
    HangSeen: "hang",
    Stall: "stall",
    LossLost: "loss",
    SlowRank: "slow",
    Recycled: "recycled",
    AttemptOutcome: "ended",
    PlanChanged: "plan",
    Fault: "fault",
    RunEnded: "end",
}
_OF_OUTCOME = (
    *("attempt", "status", "lived_s", "ended_by", "signals", "killed", "unkillable", "kind"),
    *("fingerprint", "root_rank", "root_line", "decided_by", "stack", "action", "reason"),
    *("delay_s", "add", "lost_work", "untried", "first_step", "user_frame", "saved"),
)
_NUMBERS = (int, float)
# Fields that are left out of a line where they are empty or false; a number is not, be it 0.
_LEFT_OUT = (
    *("status", "stack", "lost_work", "first_step", "price_per_gpu_hour", "traceback"),
    *("left", "untried", "gpu_names", "checkpoint", "advice", "saved", "asked"),
)


def as_line(facts: EventFacts) -> dict[str, Any]:
    """Return the fields of an event's line, as values for JSON."""
    found = as_tree(facts)
    if isinstance(facts, AttemptOutcome):
        found |= found["diagnosis"] | found["decision"]
        found |= {"attempt": facts.number, "status": facts.exit_code}
        found = {name: found[name] for name in _OF_OUTCOME}
        found["root_line"] = facts.diagnosis.root_line or None
    return {k: v for k, v in found.items() if k not in _LEFT_OUT or v or type(v) in _NUMBERS}


def in_fields(kind: object, line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line with the names of the fields of its type: the inverse of `as_line`."""
    if kind is not AttemptOutcome:
        return line
    own = {"number": line.get("attempt"), "exit_code": line.get("status")}
    return {**line, **own, "diagnosis": line, "decision": line}
