"""Whether the process that wrote a record still lives, and other facts about processes.

A pid alone proves nothing: the kernel reuses pids, and other machines and containers have their
own. Together with the start time, the boot and the pid namespace it is unique.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import TypedDict

from saferun.base import proc
from saferun.system.printable import printable


class ProcessRecord(TypedDict, total=False):
    """The facts that identify a process among all processes of all machines."""

    pid: int
    start: int | None  # clock ticks since boot (proc_pid_stat(5), field 22)
    host: str
    boot: str  # "" if it cannot be read
    pids: str  # namespaces of its pid and of its start time


def this_process() -> ProcessRecord:
    """Return the record of this process."""
    return {
        "pid": os.getpid(),
        "start": proc.start(os.getpid()),
        "host": os.uname().nodename,
        "boot": proc.boot(),
        "pids": proc.own_place(),
    }


def lives(record: ProcessRecord) -> bool | None:
    """Return whether the process of a record lives; None if that cannot be known here.

    Args:
        record: a result of `this_process`, possibly from another machine; it may be corrupt.
    """
    pid, started = record.get("pid"), record.get("start")
    if type(pid) is not int or type(started) is not int or not record.get("boot"):
        return None
    if record["boot"] != proc.boot():  # this machine was rebooted, or it is another one
        return False if record.get("host") == os.uname().nodename else None
    if record.get("pids") != proc.own_place() or not _is_our_proc():
        return None
    return lives_since(pid, started)


def lives_since(pid: int, started: int) -> bool | None:
    """Return whether the process with this pid and start lives on this machine; None if it may.

    Args:
        pid: the process's pid, which another process may have by now.
        started: its start time in clock ticks since boot.
    """
    seen = proc.start(pid)
    return seen == started if seen is not None else _hidden(pid)


def is_of_here(record: ProcessRecord) -> bool:
    """Return whether a record was made on this machine since its boot, in our namespaces."""
    ours = (proc.boot(), proc.own_place())
    return all(ours) and _is_our_proc() and (record.get("boot"), record.get("pids")) == ours


def now() -> int:
    """Return the present time in clock ticks since boot, as in `start`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _hidden(pid: int) -> bool | None:
    """Return whether a process lives that /proc hides (hidepid=2, proc(5)); None: unknown.

    A process that we may not signal is another user's, and alive; a zombie can be signalled.
    """
    if pid <= 0 or proc.stat(pid) is not None:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return None


def missing() -> str:
    """Return why a process cannot find its descendants by /proc; "" if it can."""
    if not os.path.exists("/proc/self/stat"):
        return "there is no /proc"
    return "" if _is_our_proc() else "/proc shows another pid namespace"


def _is_our_proc() -> bool:
    """Return whether /proc shows our pid namespace; `unshare --pid` alone keeps the outer one."""
    return proc.link("/proc/self") == str(os.getpid())


def lineage(pid: int) -> Iterator[tuple[int, int]]:
    """Yield a process and its ancestors, each with its start time in clock ticks since boot."""
    while pid > 0:
        fields = proc.stat(pid)
        if fields is None:
            return
        yield pid, int(fields[19])
        pid = int(fields[1])


def uids(pid: int) -> set[int]:
    """Return the user ids of a process, real, effective, saved and of the file system."""
    lines = proc.text(f"/proc/{pid}/status").splitlines()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}


def comm(pid: int) -> str:
    """Return a process's short name (at most 15 characters), or "ended".

    A process chooses its own name (PR_SET_NAME): unprintable characters are replaced.
    """
    return printable(proc.text(f"/proc/{pid}/comm").strip()) or "ended"


def numbers(text: str) -> set[int]:
    """Return the numbers in a list of the kernel's, such as those of CPUs.

    >>> sorted(numbers("0-2,8\\n"))
    [0, 1, 2, 8]
    """
    found = re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    return {n for first, last in found for n in range(int(first), int(last or first) + 1)}
