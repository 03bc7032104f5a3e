"""The descendants of this process: find the living ones, signal one, end them all.

Pid and start time together identify a process, since the kernel reuses pids. This module uses only
the standard library: the keeper's process has no other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from saferun.base import proc

UNKILLABLE_S = 30.0  # the kernel may take this long to free a killed process's resources
# Limit for stopping all before the first is killed. If a process (another user's, which we cannot
# stop) still makes new ones after it, these are killed as they are found.
_FREEZE_S = 5.0
# Pauses between checks whether the killed processes are gone: first the duration of one exit, then
# doubled, up to a value that costs a core nothing.
_PAUSES_S = (0.0005, 0.05)


def read_stat(pid: int | str) -> tuple[int, str, int, int] | None:
    """Return (parent, state, start time, process group) of a process; None if it is gone."""
    fields = proc.stat(pid)
    if fields is None:
        return None
    return int(fields[1]), fields[0], int(fields[19]), int(fields[2])


def _is_dead(pid: int, state: str) -> bool:
    # A leader whose other threads still run also counts as a zombie, but keeps all its resources.
    if state not in "ZX":
        return False
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


def opens(pid: int, prefix: str) -> bool:
    """Return whether a process has a file open whose path begins with `prefix`."""
    return any(target.startswith(prefix) for target in proc.descriptors(pid).values())


def catches(pid: int, signum: int, *, or_blocks: bool = False) -> bool:
    """Return whether a process has a handler for a signal.

    Args:
        pid: the process's pid.
        signum: the signal.
        or_blocks: also return True if its main thread blocks the signal, as a thread that polls for
            it does (but not while it waits in sigwait(3)).
    """
    text = proc.text(f"/proc/{pid}/status")
    names = ("SigCgt:", "SigBlk:")[: 1 + or_blocks]
    fields = (text.partition(name)[2].split("\n", 1)[0] for name in names)
    return any(int(field or "0", 16) >> (signum - 1) & 1 for field in fields)


def send_signal(pid: int, start: int, signum: int) -> None:
    """Signal the process that started at `start`, but no later process with its pid.

    Args:
        pid: the process's pid.
        start: its start time, from `read_stat`.
        signum: the signal.
    """
    handle = _open_pidfd(pid)
    try:
        stat = read_stat(pid)
        if stat and stat[2] == start:
            if handle is None:
                os.kill(pid, signum)
            else:
                signal.pidfd_send_signal(handle, signum)
    except OSError:  # gone, or another user's: it will be reported as not killed
        return
    finally:
        if handle is not None:
            os.close(handle)


def _open_pidfd(pid: int) -> int | None:
    # None before Linux 5.3, in a Python that was built for an older one, in a sandbox that forbids
    # it, or if the process is gone.
    try:
        return os.pidfd_open(pid) if hasattr(signal, "pidfd_send_signal") else None
    except (OSError, AttributeError):
        return None


class Family:
    """The descendants of this process, except those of the children in `spared()`."""

    def __init__(self, spared: Callable[[], Iterable[int]] = tuple) -> None:
        self._root = os.getpid()
        self._spared = spared
        self.first = 0  # the child whose wait status is kept
        self.status: int | None = None
        self._reaped = 0  # number of reaped children

    def living(self, *, stopping: bool = False) -> dict[int, int]:
        """Return {pid: start time} of all living descendants, and reap dead children.

        Args:
            stopping: first stop every process group that has no other members.
        """
        table = {int(pid): read_stat(pid) for pid in os.listdir("/proc") if pid.isdigit()}
        stats = {pid: stat for pid, stat in table.items() if stat}
        children: dict[int, list[int]] = {}
        for pid, stat in stats.items():
            children.setdefault(stat[0], []).append(pid)
        spared = set(self._spared())
        ours = [pid for pid in children.get(self._root, ()) if pid not in spared]
        tree = list(ours)
        for pid in tree:
            tree += children.get(pid, ())
        if stopping:
            strangers = {stats[pid][3] for pid in stats.keys() - tree}
            _stop_groups({stats[pid][3] for pid in ours} - strangers)
        for pid in ours:
            if _is_dead(pid, stats[pid][1]):
                self.reap(pid)
        return {pid: stats[pid][2] for pid in tree if not _is_dead(pid, stats[pid][1])}

    def children(self) -> set[int]:
        """Return children that may live; a scan of /proc misses processes that fork and exit.

        The kernel's answer "no child" is exact, and includes dead ones. Otherwise its list is read:
        a new child is appended to it before its parent is dead. (A dead child stays in it while a
        debugger has it. Kernels without CONFIG_PROC_CHILDREN have no list, so nothing is returned.)
        """
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()
        listed = self._listed()
        stats = {pid: read_stat(pid) for pid in listed}
        alive = {pid for pid, stat in stats.items() if stat and not _is_dead(pid, stat[1])}
        return alive or self._listed() - listed

    def _listed(self) -> set[int]:
        pids: set[int] = set()
        for thread in os.listdir("/proc/self/task"):
            pids.update(map(int, proc.data(f"/proc/self/task/{thread}/children").split()))
        return pids.difference(self._spared())

    def end(self, limit_s: float = UNKILLABLE_S) -> tuple[int, list[int]]:
        """Kill all of them; arguments and result are as for `end_processes`."""
        return end_processes(lambda: self.living(stopping=True), limit_s, self.children)

    def end_openers(self, prefix: str) -> tuple[int, list[int]]:
        """Kill those with an open file whose path begins with `prefix`; the others continue.

        If there is one, or if a child died during the look (processes that fork and exit may then
        have been missed), all are stopped for another look, and continued.

        Args:
            prefix: the beginning of the paths.

        Returns:
            As for `end_processes`.
        """

        def openers() -> dict[int, int]:
            return {pid: start for pid, start in self.living().items() if opens(pid, prefix)}

        self.reap()
        before = self._reaped
        if not openers():
            self.reap()
            if self._reaped == before:
                return 0, []
        stopped = self._stop()
        killed, left = end_processes(openers, 0.0)
        self._continue(stopped)
        more, left = end_processes(openers, UNKILLABLE_S) if left else (0, left)
        return killed + more, left

    def _stop(self) -> set[int]:
        """Stop all processes; return those that were stopped before."""
        stats = {pid: read_stat(pid) for pid in self.living()}
        limit = time.monotonic() + _FREEZE_S
        before = -1
        while self._reaped != before and time.monotonic() < limit:  # otherwise no new one was made
            before = self._reaped
            _freeze(lambda: self.living(stopping=True))
            self.reap()
        return {pid for pid, stat in stats.items() if stat and stat[1] == "T"}

    def _continue(self, stopped: set[int]) -> None:
        """Continue all except those; children first, so that no shell takes one for stopped."""
        for pid, start in reversed(self.living().items()):
            if pid not in stopped:
                send_signal(pid, start, signal.SIGCONT)

    def reap(self, which: int = -1) -> bool:
        """Reap dead children; return whether there are any children left."""
        try:
            while True:
                pid, status = os.waitpid(which, os.WNOHANG)
                if not pid:
                    return True
                self._reaped += 1
                if pid == self.first:
                    self.status = status
        except ChildProcessError:
            return False


def end_processes(
    find: Callable[[], dict[int, int]],
    limit_s: float = UNKILLABLE_S,
    unseen: Callable[[], set[int]] = set,
) -> tuple[int, list[int]]:
    """Kill the results of `find()` until it returns none: all are frozen first, then killed.

    Args:
        find: function that returns {pid: start time}.
        limit_s: how long to wait for processes that do not die, in seconds.
        unseen: function that returns pids which `find` may have missed; called if `find` returns
            none.

    Returns:
        The number of killed processes, and the pids that live on.
    """
    limit = time.monotonic() + limit_s
    seen: dict[int, int] = {}
    pause, longest = _PAUSES_S
    while True:
        living = _freeze(find)
        for pid, start in living.items():
            send_signal(pid, start, signal.SIGKILL)
        seen.update(living)
        if living:
            time.sleep(pause)
            pause = min(pause * 2, longest)
            living = find()
        left = living or unseen()
        if not left or time.monotonic() > limit:
            return len(seen) - len(living), sorted(left)


def _freeze(find: Callable[[], dict[int, int]]) -> dict[int, int]:
    # A stopped process does not fork: when a scan finds no new process, all are stopped.
    frozen: dict[int, int] = {}
    limit = time.monotonic() + _FREEZE_S
    while True:
        found = find()
        fresh = [(pid, start) for pid, start in found.items() if frozen.get(pid) != start]
        if not fresh or time.monotonic() > limit:
            return found
        for pid, start in fresh:
            send_signal(pid, start, signal.SIGSTOP)
        frozen.update(fresh)


def _stop_groups(groups: Iterable[int]) -> None:
    """Stop process groups, each atomically: a fork happens before or after, so none escapes.

    Args:
        groups: each group has one of our children in it, dead or alive. Only we reap these, so the
            number cannot belong to another group.
    """
    for group in groups:
        try:
            os.killpg(group, signal.SIGSTOP)
        except OSError:  # another user's, or its last member is reaped
            continue
