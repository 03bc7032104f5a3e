"""The events of a run: what the writer is given, and what the reader returns, one type for each.

The fields stand in a line of events.jsonl under their names, in their order. A line of an
AttemptOutcome has the names in _OF_OUTCOME: fields of its diagnosis and decision stand among its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.silence import Place
from saferun.inject.node.node_agreement import Report
from saferun.model import Finding, as_tree
from saferun.system.procfs import ProcessRecord


class AttemptBegun(NamedTuple):
    """An attempt is about to start."""

    attempt: int
    mitigations: tuple[str, ...]
    by: ProcessRecord | None  # saferun's; None where it is missing
    left: int | None = None  # attempts that can follow it without progress; None: not known
    gpus: int | None = None  # this machine's, visible to the job; None where it is not known
    price_per_gpu_hour: float | None = None  # as the profile has it
    versions: tuple[str, ...] = ()  # "saferun 1.0.0", "torch 2.13.0+cpu"
    gpu_names: tuple[str, ...] = ()  # each once
    checkpoint: str = ""  # the one that `retry.resume` has it go on from


class WorkersBegun(NamedTuple):
    """The workers of a run are about to start."""

    count: int  # type: ignore[assignment]  # the word on disk; a tuple has a method of that name
    by: ProcessRecord | None  # see AttemptBegun


class WorkerBegun(NamedTuple):
    """The supervisor of one worker has started."""

    supervisor: int  # pid
    gpu: str | None  # UUID


class Started(NamedTuple):
    """The processes of an attempt have started."""

    keeper: int  # pid
    launcher: int  # pid


class Preflight(NamedTuple):
    """The GPUs were tested before an attempt."""

    granted: bool
    findings: tuple[Finding, ...]


class Recovery(NamedTuple):
    """Something was done for the GPUs after a failure."""

    findings: tuple[Finding, ...]


class NodesMet(NamedTuple):
    """The nodes of a run agreed on an attempt: inject/node/node_agreement.Agreement."""

    action: str
    attempt: int  # the one for which they met
    mitigations: list[str]
    root: Report | None
    why: str
    hosts: dict[str, str]
    shared: str
    beats: bool


class Hang(NamedTuple):
    """A job was silent for too long."""

    silent_s: float
    ranks: tuple[Place, ...]
    stacks: str | None  # a file in the run's directory


class Stall(NamedTuple):
    """Ranks wait for another one that is silent; or, without a line, they do so no more."""

    line: str  # who waits for whom, for people
    silent_s: float
    ranks: tuple[Place, ...]


class LossLost(NamedTuple):
    """A training's loss is not a number any more: diagnosis/evidence.NoNumber."""

    line: str  # for people
    value: str
    step: int | None
    good: str
    good_step: int | None
    checkpoint: str | None  # the newest one of the run from before that


class SlowRank(NamedTuple):
    """The others wait for one rank in nearly every collective: diagnosis/slow_rank.Slow."""

    line: str  # for people
    rank: int
    share: float  # of the job's time that it costs
    collectives: int  # so many were compared
    facts: tuple[str, ...]  # what its GPU and its CPU show beside the others'


class Recycled(NamedTuple):
    """The process of an attempt is replaced, as it asked: recycling.Request."""

    attempt: int
    why: str
    kind: str
    progress: int


class PlanChanged(NamedTuple):
    """The plan of a later attempt, as planning/view.as_json has it."""

    plan: dict[str, Any]


class Fault(NamedTuple):
    """A fault of saferun's own; the job goes on."""

    what: str
    traceback: str


class RunEnded(NamedTuple):
    """The run is over, or one of its workers is."""

    status: int | None  # exit status; None after a fault of saferun's own
    reason: str
    advice: str = ""  # how often the job should save
    asked: bool = False  # a signal from outside ended it


NAMES: dict[type[EventFacts], str] = {
    AttemptBegun: "attempt",
    WorkersBegun: "workers",
    WorkerBegun: "worker",
    Started: "started",
    Preflight: "preflight",
    Recovery: "recovery",
    NodesMet: "nodes",
    Hang: "hang",
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
EventFacts: TypeAlias = (
    AttemptBegun
    | WorkersBegun
    | WorkerBegun
    | Started
    | Preflight
    | Recovery
    | NodesMet
    | Hang
    | Stall
    | LossLost
    | SlowRank
    | Recycled
    | AttemptOutcome
    | PlanChanged
    | Fault
    | RunEnded
)


def as_line(facts: EventFacts) -> dict[str, Any]:
    """Return what a line has of an event, as JSON knows it."""
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
