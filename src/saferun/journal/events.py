"""The events of a run, read tolerantly from events.jsonl and typed once.

A journal may be cut, garbage, half written on a full disk, another user's or still being written. A
field without a value of its type is unknown (None, "", empty), and nothing here fails because of
it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

from saferun.base import files, untrusted
from saferun.base.untrusted import count, is_number, mapping, number, strings, text
from saferun.diagnosis.attempt_outcome import Decision
from saferun.diagnosis.diagnosis import Diagnosis, Near
from saferun.diagnosis.evidence import NoNumber
from saferun.diagnosis.places import Place
from saferun.diagnosis.work_lost import Saved, WorkLost
from saferun.inject.node.node_agreement import NodeReport
from saferun.journal.event_types import NAMES, EventFacts, in_fields
from saferun.model import Finding
from saferun.system.procfs import ProcessRecord

T = TypeVar("T")

FILE = "events.jsonl"
_READ_BYTES = 64 << 20  # most of an events.jsonl that is read


class Event(NamedTuple):
    """One line of events.jsonl."""

    name: str
    at: float | None  # seconds since the epoch
    since_begin_s: float | None
    attempt: int | None
    status: int | None  # exit status
    reason: str
    asked: bool  # a signal from outside ended the run
    lost: int  # number of events before it that the disk did not take
    worker: int | None  # number of the worker; None if it concerns the whole run
    facts: EventFacts | None  # the fields of its kind; None for an unknown kind


def read(run_path: str) -> tuple[Event, ...]:
    """Return the events of the run in a directory, in the order in which they were written."""
    return tuple(_typed(raw) for raw in read_raw(os.path.join(run_path, FILE)))


def _typed(raw: Mapping[str, Any]) -> Event:
    reason = text(raw.get("reason"))
    return Event(
        name=raw["event"],
        at=number(raw.get("at")),
        since_begin_s=number(raw.get("s")),
        attempt=count(raw.get("attempt")),
        status=count(raw.get("status")),
        reason=reason,
        # The event of an attempt has the reason alone, and so have older journals.
        asked=raw.get("asked") is True or "asked to end" in reason,
        lost=count(raw.get("lost")) or 0,
        worker=count(raw.get("worker")),
        facts=_facts(raw),
    )


def _facts(raw: Mapping[str, Any]) -> EventFacts | None:
    kind = _KINDS.get(raw["event"])
    return None if kind is None else record(kind, in_fields(kind, raw))


def record(kind: Callable[..., T], value: object) -> T:
    """Return a value with fields from a JSON object; what the object does not hold is unknown."""
    raw = mapping(value)
    return kind(**{name: read_as(raw.get(name)) for name, read_as in _readers(kind)})


@functools.cache
def _readers(kind: Callable[..., object]) -> list[tuple[str, Callable[[object], object]]]:
    """Return the name and the reader of the type of each field."""
    return [(name, _AS[found]) for name, found in get_type_hints(kind).items()]


# --- lines -------------------------------------------------------------------------------------


def read_raw(path: str) -> list[dict[str, Any]]:
    """Return the events of an events.jsonl as JSON objects, whatever was cut off or mixed in.

    Lines that are no event are skipped. If another line was appended to a cut one, the appended
    line is read. An unreadable file, or one that is no regular file, has no events.
    """
    events = (_event(line) for line in files.read(path, _READ_BYTES).split(b"\n") if line)
    return [event for event in events if event is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or of its end: a line that was cut off may stand before it."""
    for start in (0, line.rfind(b'{"at":')):
        found = untrusted.value(line[max(0, start) :])
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            return found
    return None


# --- fields that may hold anything ---------------------------------------------------------------


def _pids(value: object) -> tuple[int, ...]:
    return tuple(pid for pid in value if count(pid)) if isinstance(value, list) else ()


def _work_lost(value: object) -> WorkLost | None:
    return record(WorkLost, value) if number(mapping(value).get("s")) is not None else None


def _records(kind: Callable[..., T]) -> Callable[[object], tuple[T, ...]]:
    """Return a reader of lists of objects."""
    return lambda value: tuple(
        record(kind, one) for one in (value if isinstance(value, list) else ())
    )


def _numbers(value: object) -> tuple[float, ...]:
    return tuple(filter(is_number, value)) if isinstance(value, list) else ()


def _hosts(value: object) -> dict[str, str]:
    return {node: host for node, host in mapping(value).items() if isinstance(host, str)}


_KINDS: dict[str, Callable[..., EventFacts]] = {name: kind for kind, name in NAMES.items()}
# The reader of a field, by its type.
_AS: dict[object, Callable[[object], object]] = {
    bool: lambda value: value is True,
    int: lambda value: count(value) or 0,
    int | None: count,
    float: lambda value: number(value) or 0.0,
    float | None: number,
    str: text,
    str | None: text,
    tuple[str, ...]: strings,
    list[str]: lambda value: list(strings(value)),
    tuple[int, ...]: _pids,
    tuple[float, ...]: _numbers,
    Mapping[str, Any]: mapping,
    dict[str, Any]: mapping,
    dict[str, str]: _hosts,
    ProcessRecord | None: lambda value: value if isinstance(value, dict) else None,
    NodeReport | None: lambda value: mapping(value) or None,
    WorkLost | None: _work_lost,
    tuple[Place, ...]: _records(Place),
    tuple[Finding, ...]: _records(Finding),
    tuple[Saved, ...]: _records(Saved),
    tuple[Near, ...]: _records(Near),
    Diagnosis: lambda value: record(Diagnosis, value),
    Decision: lambda value: record(Decision, value),
    NoNumber | None: lambda value: None,  # no line has it
}
