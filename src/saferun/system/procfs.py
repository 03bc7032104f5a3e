"""Whether the process that wrote a record still lives: proved, disproved, or not to be known.

A pid alone proves nothing, since the kernel gives it away again, and another machine or container
has its own. Its start time, the boot and the pid namespace make it unique.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other, of any machine.

    `start` is in clock ticks since boot (proc_pid_stat(5), field 22); what cannot be learned is
    None or "".
    """
    return {
        "pid": os.getpid(),
        "start": start(os.getpid()),
        "host": os.uname().nodename,
        "boot": _boot(),
        "pids": _namespace(),
    }


def lives(told: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a record lives; None where that cannot be known from here.

    Args:
        told: what `this_process` returned, perhaps on another machine, perhaps garbage by now.
    """
    pid, began = told.get("pid"), told.get("start")
    if type(pid) is not int or type(began) is not int or not told.get("boot"):
        return None
    if told["boot"] != _boot():  # this machine has been started anew, or it is another one
        return False if told.get("host") == os.uname().nodename else None
    if told.get("pids") != _namespace():
        return None
    return start(pid) == began


def lineage(pid: int) -> Iterator[tuple[int, int]]:
    """Yield this process and those above it, with the time at which each began."""
    while pid > 0:
        fields = stat(pid)
        if fields is None:
            return
        yield pid, int(fields[19])
        pid = int(fields[1])


def start(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; None where it is gone or a zombie."""
    fields = stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on, proc_pid_stat(5)."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None


def uids(pid: int) -> set[int]:
    """Return the user ids of a process, real, effective, saved and of the file system."""
    try:
        lines = read(f"/proc/{pid}/status").splitlines()
    except OSError:
        return set()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}


def comm(pid: int) -> str:
    """Return a process's short name, 15 characters at the most."""
    try:
        return read(f"/proc/{pid}/comm").strip()
    except OSError:
        return "ended"


def read(path: str) -> str:
    """Return a file of /proc as text. Raises OSError where it is gone."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
