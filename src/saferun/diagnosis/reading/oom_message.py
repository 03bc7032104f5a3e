"""Pure: the numbers of an out-of-memory message, in the wordings of torch from 0.4 to 2.13.

Fragmentation, a full card, another process's memory and a refusal despite free memory all print
"CUDA out of memory". The numbers in the message tell them apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 2**-20, "kib": 2**-10, "mib": 1.0, "gib": 1024.0, "tib": 1024.0**2}
_SIZE = r"(?P<n>\d{1,12}(?:\.\d{1,6})?)\s?(?P<u>bytes|[KMGT]iB)"
_FIELDS = {
    "requested": rf"(?:Tried to allocate|tried to allocate) {_SIZE}",
    "total": rf"(?:total capaci?ty of {_SIZE})",
    "total_old": rf"{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free",
    "free_old": rf"{_SIZE} free\b",
    "allowed": rf"{_SIZE} allowed;",  # set_per_process_memory_fraction
    "process": rf"this process has {_SIZE}",
    "allocated": rf"Of the allocated memory {_SIZE}",
    "allocated_old": rf"{_SIZE} already allocated",
    "idle": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "cached": rf"{_SIZE} cached",  # torch < 1.4: "cached" includes idle memory
    "reserved": rf"{_SIZE} reserved in total",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
# Memory is fragmented if the allocator's idle memory and the card's free memory together would
# serve the request (growing segments can use both) and the idle part is at least a tenth of the
# card. With a smaller part, growing segments have not been seen to help.
_IDLE_SHARE = 0.10
_LITTLE_SHARE = 0.50  # a process that holds at most this part of the card does not fill it
_FREE_FACTOR = 1.25  # free memory of this many times the request should have served it
_FREE_SHARE = 0.05  # the driver may reserve up to this part of a full card
_NO_SIZE = 2.0**40  # MiB; larger sizes are negative numbers printed as unsigned


@dataclass(frozen=True, slots=True)
class Memory:
    """The numbers of an out-of-memory message, in MiB; None for missing ones."""

    requested: float | None
    total: float | None
    free: float | None
    held: float | None  # memory of this process: allocated and idle
    idle: float | None  # part of `held` that is reserved but not allocated
    allowed: float | None = None  # a limit that the process set itself


def read(text: str) -> Memory:
    """Read a message; lines that a terminal broke must be joined already."""
    sizes = {name: _size(pattern.search(text)) for name, pattern in _PATTERNS.items()}
    allocated = _first(sizes["allocated"], sizes["allocated_old"])
    idle = _first(sizes["idle"], sizes["cached"])
    if idle is None and sizes["reserved"] is not None and allocated is not None:
        idle = sizes["reserved"] - allocated
    process = sizes["process"]
    held = process if process and process < _NO_SIZE else None
    if allocated is not None:
        held = max(held or 0.0, allocated + (idle or 0.0))
    total = _first(sizes["total"], sizes["total_old"])
    free = _first(sizes["free"], sizes["free_old"])
    return Memory(sizes["requested"], total, free, held, idle, sizes["allowed"])


def _size(found: re.Match[str] | None) -> float | None:
    return float(found["n"]) * _UNITS[found["u"].lower()] if found else None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def kind(memory: Memory) -> str:
    """Return the kind of failure that the numbers mean; `cuda-oom` if they do not decide."""
    requested, total, free = memory.requested, memory.total, memory.free
    held, idle, allowed = memory.held, memory.idle, memory.allowed
    if (
        total is not None and allowed is not None and allowed < total
    ):  # the process's own limit replaces the card
        total, free = allowed, min(free or 0.0, max(0.0, allowed - (held or allowed)))
    if requested is None or total is None or requested > total:
        return "cuda-oom"
    if held is not None and held > total:
        return "cuda-oom"  # the driver adds host memory, which is full, too
    enough = max(requested * _FREE_FACTOR, _FREE_SHARE * total)
    if free is not None and free >= enough:
        return "cuda-oom-despite-free"
    if idle is not None and idle >= _IDLE_SHARE * total and idle + (free or 0.0) >= requested:
        return "cuda-oom-fragmentation"
    # At least a third of the card is then neither free (see above) nor needed by this process.
    if free is not None and held is not None and held + requested <= _LITTLE_SHARE * total:
        return "cuda-oom-other-process"
    return "cuda-oom"


def sentence(memory: Memory) -> str:
    """Return the numbers as one sentence; "" if the message has none."""
    parts = [
        f"{_readable(value)} {meaning}"
        for value, meaning in (
            (memory.requested, "asked for"),
            (memory.free, "free"),
            (memory.held, "held by this process"),
            (memory.idle, "of that idle in the allocator"),
            (memory.allowed, "allowed by the process's own limit"),
            (memory.total, "on the card"),
        )
        if value is not None
    ]
    return f"{', '.join(parts)}." if parts else ""


def _readable(mib: float) -> str:
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
