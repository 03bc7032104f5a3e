"""The events of a run, as events.jsonl has them: read tolerantly, typed once.

A journal may be cut, garbage, half of a full disk's, another user's or still being written. What a
field does not hold in its type is unknown (None, "", empty), and nothing here fails for it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping

from saferun.named_tuple import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

FILE = "events.jsonl"
_READ_PIECES = 64  # MiB of an events.jsonl that are read
_MAX_AT = 253_402_214_400.0  # the year 9999: later times cannot be shown


class AttemptBegun(NamedTuple):
    """The event `attempt`: an attempt is about to start; or `workers`: the workers are."""

    mitigations: tuple[str, ...]
    by: dict[str, Any] | None  # procfs.this_process() of saferun; None where it is missing


class AttemptEnded(NamedTuple):
    """The event `ended`: an attempt is over, judged and decided upon."""

    lived_s: float | None
    ended_by: str  # "job", "grace", "interrupt", "keeper"
    kind: str  # of the failure; "" where there was none
    rank: int | None  # that failed first
    line: str  # that decided, without its particulars where the journal has no other
    action: str  # what was decided: "again", "stop", "done"
    delay_s: float
    signals: tuple[str, ...]  # that were passed on to it
    killed: int  # processes that had to be killed
    unkillable: tuple[int, ...]  # pids
    lost: dict[str, Any]  # the work since the last checkpoint: diagnosis/work_lost.WorkLost
    decided_by: tuple[str, ...]  # the evidence that decided what failed


class PlanChanged(NamedTuple):
    """The event `plan`: the plan of a later attempt."""

    plan: dict[str, Any]


Facts: TypeAlias = AttemptBegun | AttemptEnded | PlanChanged


class Event(NamedTuple):
    """One line of events.jsonl."""

    name: str
    at: float | None  # seconds since the epoch
    since_begin_s: float | None
    attempt: int | None
    status: int | None  # exit status
    reason: str
    lost: int  # events before it that the disk did not take
    worker: int | None  # of several; None for what concerns the whole run
    facts: Facts | None  # of the events that have more to say than the above


def read(run_path: str) -> tuple[Event, ...]:
    """Return the events of the run in this directory, in the order in which they were written."""
    return tuple(_typed(raw) for raw in read_raw(os.path.join(run_path, FILE)))


def _typed(raw: Mapping[str, Any]) -> Event:
    return Event(
        name=raw["event"],
        at=number(raw.get("at")),
        since_begin_s=number(raw.get("s")),
        attempt=count(raw.get("attempt")),
        status=count(raw.get("status")),
        reason=text(raw.get("reason")),
        lost=count(raw.get("lost")) or 0,
        worker=count(raw.get("worker")),
        facts=_facts(raw),
    )


def _facts(raw: Mapping[str, Any]) -> Facts | None:
    if raw["event"] in ("attempt", "workers"):
        by = raw.get("by")
        return AttemptBegun(strings(raw.get("mitigations")), by if isinstance(by, dict) else None)
    if raw["event"] == "ended":
        return _ended(raw)
    return PlanChanged(mapping(raw.get("plan"))) if raw["event"] == "plan" else None


def _ended(raw: Mapping[str, Any]) -> AttemptEnded:
    pids = raw.get("unkillable")
    return AttemptEnded(
        lived_s=number(raw.get("lived_s")),
        ended_by=text(raw.get("ended_by")),
        kind=text(raw.get("kind")),
        rank=count(raw.get("root_rank")),
        line=_deciding_line(raw),
        action=text(raw.get("action")),
        delay_s=number(raw.get("delay_s")) or 0.0,
        signals=strings(raw.get("signals")),
        killed=count(raw.get("killed")) or 0,
        unkillable=tuple(p for p in pids if count(p)) if isinstance(pids, list) else (),
        lost=mapping(raw.get("lost_work")),
        decided_by=strings(raw.get("decided_by")),
    )


def _deciding_line(raw: Mapping[str, Any]) -> str:
    """Return the line that decided; of a fingerprint it is the part behind the kind."""
    line = text(raw.get("root_line"))
    return line or text(raw.get("fingerprint")).partition(":")[2].strip()


# --- lines -------------------------------------------------------------------------------------


def read_raw(path: str) -> list[dict[str, Any]]:
    """Return the events of an events.jsonl as JSON has them, whatever was cut off or mixed in.

    Lines that are no event are skipped. Where a line was cut and another was appended to it, the
    other one is read. A file that cannot be read, or is no regular file, has no events.
    """
    try:
        content = _content(path)
    except (OSError, ValueError):
        return []
    events = (_event(line) for line in content.split(b"\n") if line)
    return [event for event in events if event is not None]


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        pieces: list[bytes] = []
        while (piece := os.read(descriptor, 1 << 20)) and len(pieces) < _READ_PIECES:
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def _event(line: bytes) -> dict[str, Any] | None:
    for start in (0, line.rfind(b'{"at":')):
        try:
            found = json.loads(line[max(0, start) :])
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            return found
    return None


# --- fields that may hold anything ---------------------------------------------------------------


def number(value: object) -> float | None:
    """Return a number that can be a time, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= _MAX_AT and math.isfinite(value) else None


def count(value: object) -> int | None:
    """Return a whole number below 2**31, else None."""
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def text(value: object) -> str:
    """Return a text, else ""."""
    return value if isinstance(value, str) else ""


def strings(value: object) -> tuple[str, ...]:
    """Return the texts of a list, else nothing."""
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def mapping(value: object) -> dict[str, Any]:
    """Return a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}
