"""Whether a keeper can answer: a stopped one (SIGSTOP) would neither report nor end.

It is judged by its state in /proc, not by the time that an answer takes, since a busy machine only
delays it. The keeper has its own session, so no key at a terminal stops it.
"""

from __future__ import annotations

from collections.abc import Callable

from saferun.keeper.process_tree import read_stat

LOOK_S = 1.0  # between two looks
LOOKS = 6  # stopped in so many successive looks: for 5 s in which we ran ourselves
_STOPPED = "T"  # proc(5); a process under a debugger is "t"


class KeeperWatch:
    """Examine a keeper repeatedly.

    Args:
        pid: the keeper's pid.
        clock: function that returns seconds.
    """

    def __init__(self, pid: int, clock: Callable[[], float]) -> None:
        self._pid = pid
        self._clock = clock
        self._due_s = clock() + LOOK_S
        self._stopped = 0  # successive looks

    def left_ms(self, other_ms: float | None) -> float:
        """Return the milliseconds until a look is due, or `other_ms` if that is less."""
        left_ms = max(0.0, self._due_s - self._clock()) * 1000
        return left_ms if other_ms is None else min(left_ms, other_ms)

    def stopped_too_long(self) -> bool:
        """Read the keeper's state if a look is due; return whether it was stopped for too long."""
        if self._clock() < self._due_s:
            return False
        self._due_s = self._clock() + LOOK_S
        stat = read_stat(self._pid)
        self._stopped = self._stopped + 1 if stat and stat[1] == _STOPPED else 0
        return self._stopped == LOOKS
