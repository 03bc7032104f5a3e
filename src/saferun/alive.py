"""Whether the process that wrote a record still lives: proved, disproved, or not to be known.

A pid alone proves nothing, since the kernel gives it away again, and another machine or container
has its own. Its start time, the boot and the pid namespace make it unique.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other, of any machine.

    `start` is in clock ticks since boot (proc_pid_stat(5), field 22); what cannot be learned is
    None or "".
    """
    return {
        "pid": os.getpid(),
        "start": _start("self"),
        "host": os.uname().nodename,
        "boot": _boot(),
        "pids": _namespace(),
    }


def lives(told: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a record lives; None where that cannot be known from here.

    Args:
        told: what `this_process` returned, perhaps on another machine, perhaps garbage by now.
    """
    pid, start = told.get("pid"), told.get("start")
    if type(pid) is not int or type(start) is not int or not told.get("boot"):
        return None
    if told["boot"] != _boot():  # this machine has been started anew, or it is another one
        return False if told.get("host") == os.uname().nodename else None
    if told.get("pids") != _namespace():
        return None
    return _start(str(pid)) == start


def _start(pid: str) -> int | None:
    """Return when a process began; None where it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


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
