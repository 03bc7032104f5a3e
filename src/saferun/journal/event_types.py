"""The events of a run: what the writer is given, and what the reader returns, one type for each.

The fields stand in a line of events.jsonl under their names, in their order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from saferun.diagnosis.silence import Place
from saferun.diagnosis.work_lost import WorkLost
from saferun.inject.nodes import Report
from saferun.model import Finding
from saferun.named_tuple import NamedTuple
from saferun.system.procfs import ProcessRecord


class AttemptBegun(NamedTuple):
    """An attempt is about to start."""

    attempt: int
    mitigations: tuple[str, ...]
    by: ProcessRecord | None  # of saferun; None where it is missing
    left: int | None = None  # attempts that can follow it without progress; None: not known
    gpus: int | None = None  # of this machine, visible to the job; None where it is not known
    price_per_gpu_hour: float | None = None  # as the profile has it
    versions: tuple[str, ...] = ()  # "saferun 1.0.0", "torch 2.13.0+cpu"
    gpu_names: tuple[str, ...] = ()  # each once


class WorkersBegun(NamedTuple):
    """The workers of a run are about to start."""

    count: int  # type: ignore[assignment]  # the word on disk; a tuple has a method of that name
    by: ProcessRecord | None  # as above


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
    """The nodes of a run agreed on an attempt: inject/nodes.Agreement."""

    action: str
    attempt: int  # for which they met
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


class Recycled(NamedTuple):
    """The process of an attempt is replaced, as it asked: recycling.Request."""

    attempt: int
    why: str
    kind: str
    progress: int


class AttemptEnded(NamedTuple):
    """An attempt is over, judged and decided upon."""

    attempt: int
    status: int | None
    lived_s: float | None
    ended_by: str  # "job", "grace", "interrupt", "keeper", "hang"
    signals: tuple[str, ...]  # that were passed on to it
    killed: int  # processes that had to be killed
    unkillable: tuple[int, ...]  # pids
    kind: str  # of the failure; "" where there was none
    fingerprint: str
    root_rank: int | None  # that failed first
    root_line: str | None  # that decided
    decided_by: tuple[str, ...]  # the evidence that decided what failed
    stack: tuple[str, ...]
    action: str  # what was decided: "again", "stop", "done"
    reason: str
    delay_s: float
    add: str  # the mitigation that the next attempt gets
    lost_work: WorkLost | None  # since the last checkpoint; None where it is not known
    untried: tuple[str, ...] = ()  # mitigations of the kind that are left after that
    first_step: int | None = None  # that its output reports
    user_frame: str = ""  # where the user's code was, as `train.py:28  batch["labels"]`


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


NAMES: dict[type, str] = {
    AttemptBegun: "attempt",
    WorkersBegun: "workers",
    WorkerBegun: "worker",
    Started: "started",
    Preflight: "preflight",
    Recovery: "recovery",
    NodesMet: "nodes",
    Hang: "hang",
    Recycled: "recycled",
    AttemptEnded: "ended",
    PlanChanged: "plan",
    Fault: "fault",
    RunEnded: "end",
}
# Of a line, where they are empty.
LEFT_OUT = (
    *("status", "stack", "lost_work", "first_step", "price_per_gpu_hour", "traceback"),
    *("left", "untried", "gpu_names"),
)
Facts: TypeAlias = (
    AttemptBegun
    | WorkersBegun
    | WorkerBegun
    | Started
    | Preflight
    | Recovery
    | NodesMet
    | Hang
    | Recycled
    | AttemptEnded
    | PlanChanged
    | Fault
    | RunEnded
)
