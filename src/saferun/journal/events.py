"""The events of a run, as events.jsonl has them: read tolerantly, typed once.

A journal may be cut, garbage, half of a full disk's, another user's or still being written. What a
field does not hold in its type is unknown (None, "", empty), and nothing here fails for it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from saferun.diagnosis.silence import Place
from saferun.diagnosis.work_lost import WorkLost
from saferun.journal.event_types import (
    NAMES,
    AttemptBegun,
    AttemptEnded,
    Fault,
    Hang,
    NodesMet,
    PlanChanged,
    Preflight,
    Recovery,
    Recycled,
    Started,
    WorkerBegun,
    WorkersBegun,
)
from saferun.model import Finding
from saferun.named_tuple import NamedTuple

Facts: TypeAlias = (
    AttemptBegun
    | WorkersBegun
    | WorkerBegun
    | Started
    | AttemptEnded
    | PlanChanged
    | Recycled
    | Preflight
    | Recovery
    | NodesMet
    | Hang
    | Fault
)

FILE = "events.jsonl"
_READ_PIECES = 64  # MiB of an events.jsonl that are read
_MAX_AT = 253_402_214_400.0  # the year 9999: later times cannot be shown


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
    facts: Facts | None  # of the events of which more is read


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
    kind = _READ.get(raw["event"])
    if kind is None:
        return None
    found: Any = (_AS[type_](raw.get(field)) for field, type_ in kind.__annotations__.items())
    return kind(*found)


# --- lines -------------------------------------------------------------------------------------


def read_raw(path: str) -> list[dict[str, Any]]:
    """Return the events of an events.jsonl as JSON has them, whatever was cut off or mixed in.

    Lines that are no event are skipped. Where a line was cut and another was appended to it, the
    other one is read. A file that cannot be read, or is no regular file, has no events.
    """
    try:
        lines = content(path).split(b"\n")
    except (OSError, ValueError):
        return []
    events = (_event(line) for line in lines if line)
    return [event for event in events if event is not None]


def content(path: str, most: int = _READ_PIECES) -> bytes:
    """Return what is in a regular file, and no link to one: at most so many MiB.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        pieces: list[bytes] = []
        while (piece := os.read(descriptor, 1 << 20)) and len(pieces) < most:
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


def _pids(value: object) -> tuple[int, ...]:
    return tuple(pid for pid in value if count(pid)) if isinstance(value, list) else ()


def _work_lost(value: object) -> WorkLost | None:
    lost, spent_s = mapping(value), number(mapping(value).get("s"))
    if spent_s is None:
        return None
    hours, saved = number(lost.get("gpu_hours")) or 0.0, text(lost.get("checkpoint"))
    return WorkLost(spent_s, count(lost.get("steps")), hours, saved)


def _places(value: object) -> tuple[Place, ...]:
    found = [mapping(one) for one in value] if isinstance(value, list) else []
    return tuple(
        Place(
            rank=count(one.get("rank")),
            pid=count(one.get("pid")) or 0,
            what=text(one.get("what")),
            frame=text(one.get("frame")),
            collective=one.get("collective") is True,
            odd=one.get("odd") is True,
            helpers=strings(one.get("helpers")),
        )
        for one in found
    )


def _findings(value: object) -> tuple[Finding, ...]:
    found = [mapping(one) for one in value] if isinstance(value, list) else []
    return tuple(Finding(*(text(one.get(name)) for name in Finding._fields)) for one in found)


def _hosts(value: object) -> dict[str, str]:
    return {node: host for node, host in mapping(value).items() if isinstance(host, str)}


_KINDS: tuple[type[Facts], ...] = (
    *(AttemptBegun, WorkersBegun, WorkerBegun, Started, AttemptEnded, PlanChanged, Recycled),
    *(Preflight, Recovery, NodesMet, Hang, Fault),
)
_READ: dict[str, type[Facts]] = {NAMES[kind]: kind for kind in _KINDS}
# How a field is read, by its type there.
_AS: dict[str, Callable[[object], object]] = {
    "int": lambda value: count(value) or 0,
    "int | None": count,
    "float": lambda value: number(value) or 0.0,
    "float | None": number,
    "str": text,
    "str | None": text,
    "tuple[str, ...]": strings,
    "tuple[int, ...]": _pids,
    "dict[str, Any]": mapping,
    "ProcessRecord | None": lambda value: value if isinstance(value, dict) else None,
    "WorkLost | None": _work_lost,
    "bool": lambda value: value is True,
    "list[str]": lambda value: list(strings(value)),
    "dict[str, str]": _hosts,
    "Report | None": lambda value: mapping(value) or None,
    "tuple[Place, ...]": _places,
    "tuple[Finding, ...]": _findings,
}
