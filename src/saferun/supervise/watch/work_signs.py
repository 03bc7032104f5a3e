"""Signs of work of a job's processes, read only from /proc: the job is not touched."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from saferun.base import proc
from saferun.diagnosis.places import Helper, Used
from saferun.diagnosis.silence import TERMINAL, Look, RankSign
from saferun.supervise.rank_processes import rank_of
from saferun.system.printable import printable

_TICKS = os.sysconf("SC_CLK_TCK")
# System calls of x86_64 (asm/unistd_64.h), for kernels that do not show the function.
_CALLS = {
    **{0: "read", 1: "write", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep"},
    **{45: "recvfrom", 47: "recvmsg", 61: "wait4", 202: "futex", 230: "clock_nanosleep"},
    **{232: "epoll_wait", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait"},
}

_SELECTS = (23, 270)
_OF_FILES = (0, 1, 17, 18, 19, 20, 74, 75)  # read, write, pread64, …, fsync, fdatasync


Tree: TypeAlias = dict[int, list[int]]  # the children of each process


def tree() -> Tree:
    """Return the children of each process of this machine; reads one file for each process."""
    children: Tree = {}
    for name in proc.names("/proc"):
        if name.isdigit() and (fields := proc.stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    return children


def observe_job(launcher: int, at_s: float, children: Tree) -> Look | None:
    """Return the signs of a job's processes; None if no rank is visible.

    Args:
        launcher: the pid of the command that was started.
        at_s: the current time, for the result.
        children: the result of `tree`; processes that started later are left out.
    """
    started = children.get(launcher, [])
    ranks = (
        [pid for pid in started if rank_of(pid) is not None] if rank_of(launcher) is None else []
    )
    signs = [sign for pid in ranks or [launcher] if (sign := _sign(pid))]
    if not signs:
        return None
    ticks = {
        pid: n for sign in signs for pid in _all_below(sign.pid, children) if (n := cpu_ticks(pid))
    }
    family = sorted(pid for sign in signs for pid in _below(sign.pid, children) if pid in ticks)
    others = ticks.keys() - set(family)
    return Look(
        at_s,
        tuple(n for pid in family for n in (pid, *_io(pid))),
        tuple(signs),
        sum(ticks.values()) / _TICKS,
        sum(sum(_io(pid)) for pid in others),
        any("nanosleep" in _waits_in(pid) for pid in others),
    )


def everyone(ranks: Iterable[int]) -> list[int]:
    """Return the pids of some ranks and of all their descendants."""
    children = tree()
    return [pid for rank in ranks for pid in _all_below(rank, children)]


def used(ranks: Iterable[int]) -> Used:
    """Return the resources that some ranks and their descendants have used so far."""
    found = [fields for pid in everyone(ranks) if (fields := proc.stat(pid))]
    # This includes children that have ended and were waited for.
    ticks = sum(int(one) for fields in found for one in fields[11:15])
    return Used(ticks / _TICKS, any(fields[0] == "R" for fields in found))


def helpers(ranks: Iterable[int]) -> list[Helper]:
    """Return the processes with the ranks' own program that these ranks started."""
    children = tree()
    found = []
    for rank in ranks:
        for pid in _below(rank, children):
            fields = proc.stat(pid)
            if pid != rank and fields is not None and fields[0] not in "ZX":
                found.append(Helper(rank, pid, fields[0], _waits_in(pid)))
    return found


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process in clock ticks, at least 1; 0 if it is gone or a zombie."""
    fields = proc.stat(pid)
    gone = fields is None or fields[0] in "ZX"
    return 0 if fields is None or gone else max(1, int(fields[11]) + int(fields[12]))


def _all_below(pid: int, children: Tree) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        yield (one := waiting.pop())
        waiting += children.get(one, [])


def _below(pid: int, children: Tree) -> Iterator[int]:
    """Yield a rank and its descendants with its own program: loader and compile workers.

    Other programs of a rank are left out: one that reports to a tracking service continues while
    the job hangs.
    """
    program = _program(pid)
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if one == pid or _program(one) == program:
            yield one
            waiting += children.get(one, [])


def _program(pid: int) -> str:
    return proc.link(f"/proc/{pid}/exe")


def _sign(pid: int) -> RankSign | None:
    fields = proc.stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return RankSign(rank_of(pid), pid, fields[0], cpu_s, _waits_in(pid))


def _io(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has read and written so far (proc_pid_io(5))."""
    found = re.findall(r"^[rw]char: (\d+)$", proc.text(f"/proc/{pid}/io"), re.MULTILINE)
    return (int(found[0]), int(found[1])) if len(found) == 2 else (0, 0)


def _waits_in(pid: int) -> str:
    words = proc.text(f"/proc/{pid}/syscall").split()
    known = os.uname().machine == "x86_64" and bool(words) and words[0].isdigit()
    number = int(words[0]) if known else -1
    if number in (0, *_SELECTS) and _is_terminal(pid, words):
        return TERMINAL
    function = proc.text(f"/proc/{pid}/wchan").strip()
    if function not in ("", "0"):
        return f"{function}{_file(pid, words) if number in _OF_FILES else ''}"
    return _CALLS.get(number, f"system call {number}") if known else ""


def _file(pid: int, words: list[str]) -> str:
    """Return the file that a process reads or writes, as a clause; "" for an unnamed one."""
    target = proc.link(f"/proc/{pid}/fd/{int(words[1], 16)}")
    return f" on {printable(target)}" if target.startswith("/") else ""


def _is_terminal(pid: int, words: list[str]) -> bool:
    """Return whether a process reads a terminal, or waits only for it, as readline does."""
    reads = words[0] == "0"
    if not reads and int(words[1], 16) != 1:  # it waits for more than descriptor 0
        return False
    number = int(words[1], 16) if reads else 0
    return re.match(r"/dev/(pts/\d|tty)", proc.link(f"/proc/{pid}/fd/{number}")) is not None
