"""Signs of work of a job's processes, from /proc alone: the job is not touched."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from saferun.diagnosis.silence import Look, RankSign
from saferun.system import procfs

_TICKS = os.sysconf("SC_CLK_TCK")
# Of x86_64, for kernels that do not show the function: asm/unistd_64.h.
_CALLS = {
    **{0: "read", 1: "write", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep"},
    **{45: "recvfrom", 47: "recvmsg", 61: "wait4", 202: "futex", 230: "clock_nanosleep"},
    **{232: "epoll_wait", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait"},
}


def look(launcher: int, at_s: float) -> Look | None:
    """Return what a job's processes show now; None if no rank of it can be seen.

    Args:
        launcher: the pid of the command that was started.
        at_s: the time, for the result.
    """
    children: dict[int, list[int]] = {}
    for name in procfs.names("/proc"):
        if name.isdigit() and (fields := procfs.stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    started = children.get(launcher, [])
    ranks = [pid for pid in started if _rank(pid) is not None] if _rank(launcher) is None else []
    signs = [sign for pid in ranks or [launcher] if (sign := _sign(pid))]
    if not signs:
        return None
    family = sorted(pid for sign in signs for pid in _below(sign.pid, children))
    return Look(at_s, tuple(n for pid in family for n in (pid, *_io(pid))), tuple(signs))


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    """Yield a rank and what it started of its own program: loaders' and compile workers.

    Other programs beside a rank are left out: one that reports to a tracking service goes on
    reporting while the job hangs.
    """
    program = _program(pid)
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if one == pid or _program(one) == program:
            yield one
            waiting += children.get(one, [])


def _program(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _rank(pid: int) -> int | None:
    match = re.search(r"(?:\A|\0)RANK=(\d+)\0", procfs.text(f"/proc/{pid}/environ"))
    return int(match[1]) if match else None


def _sign(pid: int) -> RankSign | None:
    fields = procfs.stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return RankSign(_rank(pid), pid, fields[0], cpu_s, _waits_in(pid))


def _io(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has read and written so far (proc_pid_io(5))."""
    found = re.findall(r"^[rw]char: (\d+)$", procfs.text(f"/proc/{pid}/io"), re.MULTILINE)
    return (int(found[0]), int(found[1])) if len(found) == 2 else (0, 0)


def _waits_in(pid: int) -> str:
    function = procfs.text(f"/proc/{pid}/wchan").strip()
    if function not in ("", "0"):
        return function
    number = procfs.text(f"/proc/{pid}/syscall").partition(" ")[0]
    known = os.uname().machine == "x86_64" and number.isdigit()
    return _CALLS.get(int(number), f"system call {number}") if known else ""
