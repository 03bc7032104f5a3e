"""The Python and native stacks of ranks by py-spy (https://github.com/benfred/py-spy).

py-spy reads a process from outside, so it also shows ranks that handle no signal, and the C++ calls
below Python's. It is used if it is installed and the kernel allows it: ptrace(2) of another user's
process, or under Yama's ptrace_scope, is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping

from saferun.base import proc
from saferun.system.command import Child

STOPS_S = 3.0  # a process that waits longer in the kernel is read without being stopped
LIMIT_S = 8.0  # for all processes; a torch rank takes about one second
# States of a process that is stopped or cannot be stopped; it does not change (ptrace(2)).
_HELD = ("D", "T", "t")
_MOST_RANKS = 64  # most ranks that are read


class NativeStacks:
    """py-spy's results for some processes; it runs in parallel, and nobody waits for it.

    Args:
        pids: the processes.
        environ: the user's environment, for PATH.
        at_s: the current time, by any clock that does not jump.
    """

    def __init__(self, pids: Iterable[int], environ: Mapping[str, str], at_s: float) -> None:
        self._until_s, self._again_s = at_s + LIMIT_S, at_s + STOPS_S
        self._running: dict[int, Child] = {}
        self._program = _program(environ)
        states = {pid: _state(pid) for pid in list(pids)[:_MOST_RANKS]} if self._program else {}
        self._stopped = {pid for pid, state in states.items() if state in ("T", "t")}
        for pid, state in states.items():
            self._start(pid, "--nonblocking" if state in _HELD else "--native")

    def are_ready(self, at_s: float) -> bool:
        """Return whether no more results will come; a py-spy that takes too long is ended."""
        if at_s >= self._again_s:
            self._again_s = self._until_s
            self._start_again()
        if at_s >= self._until_s:
            for pid, one in self._running.items():
                self._kill(pid, one)
        return all(one.has_ended() for one in self._running.values()) or at_s >= self._until_s

    def take(self) -> dict[int, str]:
        """Return pid -> stacks, for the processes that could be read; call it once."""
        answers = {pid: one.take() for pid, one in self._running.items()}
        self._running.clear()
        return {pid: answer.out for pid, answer in answers.items() if answer.status == 0}

    def _start_again(self) -> None:
        """Read again, without stopping them, the processes that the kernel holds."""
        for pid, one in list(self._running.items()):
            if not one.has_ended() and _state(pid) == "D":
                self._kill(pid, one)
                one.take()
                self._start(pid, "--nonblocking")

    def _kill(self, pid: int, one: Child) -> None:
        """End one py-spy, and resume the process that it has stopped.

        The kernel detaches the process, but a stop that py-spy sent may still arrive.
        """
        if one.kill() and pid not in self._stopped:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def _start(self, pid: int, way: str) -> None:
        assert self._program is not None
        words = (self._program, "dump", way, "--full-filenames", "--pid", str(pid))
        self._running[pid] = Child(words, os.environ)


def _state(pid: int) -> str:
    fields = proc.stat(pid)
    return fields[0] if fields else ""


def _program(environ: Mapping[str, str]) -> str | None:
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join((environ.get("PATH", os.defpath), beside)))
