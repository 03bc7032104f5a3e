"""The limits of this process's control group, and how often the kernel killed in it.

This module reads both versions of the interface. Version 2 has one tree below the mount point
(https://docs.kernel.org/admin-guide/cgroup-v2.html); version 1 has a tree for each controller
(https://docs.kernel.org/admin-guide/cgroup-v1/memory.html). A machine may use version 1 for some
controllers and version 2 for the others. A limit of any group above ours applies to us, too.

Nothing here raises: an unreadable value means no limit, or None.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from saferun.base import proc

PROC = "/proc"
MOUNT = "/sys/fs/cgroup"
COUNTS_BELOW = "memory.events"  # a group's counters in version 2, which include its subgroups
_UNLIMITED_V1 = 1 << 60  # bytes; version 1 writes "no limit" as a number near 2^63


class Group(NamedTuple):
    """Our control group in one controller."""

    folders: tuple[str, ...] = ()  # its directory and the parents, innermost first
    version: int = 2


class Memory(NamedTuple):
    """A limit of memory, and the memory in use; in bytes."""

    limit: int = -1  # -1: no limit
    used: int = -1  # -1: unknown


def group(controller: str, pid: int | str = "self") -> Group:
    """Return a process's control group.

    Args:
        controller: "memory" or "cpu".
        pid: of the process; by default this one.

    Returns:
        The group, without folders if the kernel names none. In a container the path may not be
        visible, so a folder may not exist; the last one is the mount point.
    """
    for line in proc.text(f"{PROC}/{pid}/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        named = controller in controllers.split(",")
        if not named and (number != "0" or not os.path.exists(f"{MOUNT}/cgroup.controllers")):
            continue
        base = f"{MOUNT}/{controller}" if named else MOUNT
        parts = [part for part in path.split("/") if part and part != ".."]
        tails = ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]
        return Group(tuple(os.path.join(base, tail) for tail in tails), 1 if named else 2)
    return Group()


def memory() -> Memory:
    """Return the tightest memory limit on our group, and the memory in use under it."""
    return min(_memory_limits(), key=lambda found: found.limit, default=Memory())


def memory_left() -> int | None:
    """Return how many more bytes our group may use; None without a limit."""
    known = [found for found in _memory_limits() if found.used >= 0]
    return min((max(0, found.limit - found.used) for found in known), default=None)


def _memory_limits() -> Iterator[Memory]:
    found = group("memory")
    limit_name, used_name = (
        ("memory.max", "memory.current")
        if found.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    for folder in found.folders:
        limit = _number(f"{folder}/{limit_name}")
        if 0 <= limit < _UNLIMITED_V1:
            yield Memory(limit, _number(f"{folder}/{used_name}"))


def cpu_quota() -> float:
    """Return the tightest limit of CPU time on our group, in CPUs; 0 without a limit."""
    ours, found = group("cpu"), []
    for folder in ours.folders:
        if ours.version == 2:
            pair = proc.text(f"{folder}/cpu.max").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            pair = [proc.text(f"{folder}/{name}").strip() for name in names]
        if len(pair) == 2 and all(part.isdecimal() for part in pair) and int(pair[1]):
            found.append(int(pair[0]) / int(pair[1]))
    return min(found, default=0.0)


def oom_kill_files(pid: int | str = "self") -> tuple[str, ...]:
    """Return the files that count a group's processes that were killed for lack of memory.

    The innermost comes first: in version 2 each group also counts for its subgroups, and remains
    when a subgroup is removed. In version 1 a group counts only its own processes.

    Args:
        pid: of a process in the group.
    """
    found = group("memory", pid)
    if found.version == 1:
        return tuple(f"{folder}/memory.oom_control" for folder in found.folders[:1])
    return tuple(f"{folder}/{COUNTS_BELOW}" for folder in found.folders)


def oom_kills(path: str) -> int | None:
    """Return the count in one of `oom_kill_files`, or in /proc/vmstat, the machine's count.

    The result is None if the file has no count.
    """
    for line in proc.text(path).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdecimal():
            return int(count)
    return None


def _number(path: str) -> int:
    text = proc.text(path).strip()
    return int(text) if text.isdecimal() else -1
