"""Whether an attempt's keeper can answer: a stopped one (SIGSTOP) would neither report nor end.

It is judged by its state in /proc, not by the time that it takes for an answer: a machine that is
busy makes no keeper stopped. The keeper has a session of its own, so no key at a terminal stops it.
"""

from __future__ import annotations

from collections.abc import Callable

from saferun.keeper.process_tree import read_stat

LOOK_S = 1.0  # between two looks
LOOKS = 6  # stopped in so many in a row: for 5 s in which we ran ourselves
_STOPPED = "T"  # proc(5); a process under a debugger is "t"


class KeeperWatch:
    """Looks at a keeper again and again.

    Args:
        pid: the keeper's.
        clock: seconds.
    """

    def __init__(self, pid: int, clock: Callable[[], float]) -> None:
        self._pid = pid
        self._clock = clock
        self._due_s = clock() + LOOK_S
        self._stopped = 0  # looks in a row

    def left_ms(self, other_ms: float | None) -> float:
        """Return the time until a look is due, or `other_ms` where that is less."""
        left_ms = max(0.0, self._due_s - self._clock()) * 1000
        return left_ms if other_ms is None else min(left_ms, other_ms)

    def stopped_too_long(self) -> bool:
        """Read the keeper's state, if it is time; return whether it is now stopped for too long."""
        if self._clock() < self._due_s:
            return False
        self._due_s = self._clock() + LOOK_S
        stat = read_stat(self._pid)
        self._stopped = self._stopped + 1 if stat and stat[1] == _STOPPED else 0
        return self._stopped == LOOKS
