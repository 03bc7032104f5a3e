"""Pure: when a job without signs of work may hang.

A sign of work is a byte that any process of the job reads or writes: output, steps, data, compiled
kernels and checkpoints all cause some. Weaker signs are CPU time, a GPU in use, network bytes, a
sleep, and the work of other programs below a rank: a rank in an endless loop also uses the CPU, and
so do ranks that wait for a GPU. If a limit is given, weaker signs do not count. Without one they
do, for `_BUSY` times the limit.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LEAST_S = 600.0  # smallest limit, if none is given
# After so long a silence of several ranks, the watch finds out which rank waits for which. With the
# time between two looks, and the time that ranks and NCCL get to answer, that takes less than a
# minute.
STALL_S = 30.0
_LEAST_STALL_S = 10.0  # if half of the given limit is less, the end comes soon enough
LOUD_S = 60.0  # shortest stall that is reported on stderr
# For that report it must also be this many times longer: for a rank that does nothing than the
# run's longest wait for such a rank, and for one that works than its longest silence.
_LOUDER, _LOUDER_WORKING = 2, 10
GONE_S = 120.0  # length of a stall for a vanished rank after which the attempt is ended
_GAPS = 10  # times the longest ordinary gap, if no limit is given
_BUSY = 12  # times longer, if no limit is given and there are weaker signs of work
_NEAR = 0.5  # from this part of the limit on, more costly weaker signs are checked
CORES = 0.1  # a rank that uses more is computing
RATE = 64 * 1024  # bytes/s; more than libraries exchange to keep in contact
TERMINAL = "a read from the terminal"
FOR_CHILD = re.compile(r"^(?:do_wait|wait4|waitid)$")
_OWN_TIME = re.compile(rf"nanosleep|{FOR_CHILD.pattern}")  # a sleep, or a wait for a child


class RankSign(NamedTuple):
    """One rank's state in /proc."""

    rank: int | None
    pid: int
    state: str  # proc_pid_stat(5): R, S, D, T, …
    cpu_s: float  # CPU time used so far
    waits_in: str  # kernel function or system call; "" if unknown


class Look(NamedTuple):
    """One look at a job."""

    at_s: float  # time of any clock that does not jump
    work: tuple[int, ...]  # differs if any process of the job has read or written
    ranks: tuple[RankSign, ...]
    cpu_s: float = 0.0  # CPU time of the ranks and of all that they started, so far
    beside: int = 0  # bytes read and written so far by other programs that they started
    naps: bool = False  # one of those programs sleeps


class Longest:
    """Knowledge about the run's silences that have ended.

    Attributes:
        silence_s: length of the longest silence, in seconds.
        wait_s: length of the longest wait for a rank that was not seen to work, in seconds.
        waited_at: functions in which ranks were while others waited for them.
    """

    def __init__(self) -> None:
        self.silence_s = self.wait_s = 0.0
        self.waited_at: set[str] = set()

    def loud_s(self, *, works: bool = False) -> float:
        """Return how long a stall must be to be reported on stderr, in seconds.

        Args:
            works: whether the rank that others wait for shows signs of work.
        """
        return max(LOUD_S, _LOUDER_WORKING * self.silence_s if works else _LOUDER * self.wait_s)


class Silence:
    """The gaps between a job's signs of work.

    Args:
        limit_s: how long a silence may last; None to follow the job's own rhythm.
        longest: the run's longest silences, which are updated.
        least_ranks: ranks of this machine that a stall needs at least.
    """

    def __init__(
        self, limit_s: float | None, longest: Longest | None = None, least_ranks: int = 2
    ) -> None:
        self._given_s = limit_s
        self._run, self._least_ranks = longest or Longest(), least_ranks
        self._since: Look | None = None  # last look with a new sign
        self._last: Look | None = None
        self._busy_at_s = 0.0  # time of the last weaker sign
        self._longest_s = 0.0
        self._reported = False
        self.is_stalled = False  # the silence is long enough for a stall
        self.has_slept = False  # no look was made for a while before the newest one
        self._answers = False  # the ranks were asked for their places since the last look
        self._seen: dict[int, RankSign] = {}  # rank -> its last sign

    def take(self, look: Look, every_s: float) -> Look | None:
        """Return the look with which a silence began that is now too long; each silence once.

        Args:
            look: the newest look.
            every_s: seconds between looks; a longer gap does not count as silence.
        """
        since, last, self._last = self._since, self._last, look
        if self._answers and since is not None:
            self._answers, since = False, since._replace(work=look.work)
            self._since = since
        self._seen.update({one.rank: one for one in look.ranks if one.rank is not None})
        self.has_slept = last is not None and look.at_s - last.at_s > 3 * every_s + 5
        if since is None or last is None or self.has_slept or self._works(since, look):
            if since is not None and not self.has_slept:
                self._note_end(look.at_s - since.at_s)
            self._since, self._reported, self.is_stalled = look, False, False
            return None
        if _is_busy(last, look):
            self.note_busy(look.at_s)
        if self._reported or not self._is_too_long(since, look):
            return None
        self._reported = True
        return self.with_ended(since)

    def stalls(self, look: Look) -> Look | None:
        """Return the look with which a stall of several ranks began; each stall once.

        Args:
            look: the newest look, after `take`.
        """
        since = self._since
        if since is None or self.is_stalled or self._reported:
            return None
        began = self.with_ended(since)  # others may wait for a rank that has ended
        if len(began.ranks) < self._least_ranks:
            return None
        after_s = self._stall_s
        if after_s < _LEAST_STALL_S or look.at_s - since.at_s < after_s:
            return None
        self.is_stalled = True
        return began

    def still_stalls(self, look: Look, after_s: float) -> Look | None:
        """Return the look with which the stall began, if it has lasted for `after_s`.

        Args:
            look: the newest look.
            after_s: seconds since the beginning of the stall.
        """
        since = self._since
        if since is None or not self.is_stalled or self._reported:
            return None
        if look.at_s - since.at_s < after_s:
            return None
        return self.with_ended(since)

    def answered(self, look: Look) -> None:
        """Note that the ranks were asked for their places: their writing of answers is no work.

        Their activity until the next look does not count, since an answer may come late.

        Args:
            look: the newest look.
        """
        self._last, self._answers = look, True

    def note_busy(self, at_s: float) -> None:
        """Note a weaker sign of work."""
        self._busy_at_s = at_s

    def look_again_s(self, at_s: float, every_s: float) -> float:
        """Return when to look again: at the latest when a silence becomes a stall or too long.

        Args:
            at_s: time of the last look.
            every_s: seconds between looks.
        """
        if self._since is None or self._reported:
            return every_s
        ends = (self._stall_s, self.limit_s)
        left = [left_s for end_s in ends if (left_s := self._since.at_s + end_s - at_s) > 0]
        return min(every_s, *left) if left else every_s

    def is_near(self, look: Look) -> bool:
        """Return whether weaker signs of work matter now."""
        return self._given_s is None and not self._reported and self.is_quiet(look.at_s)

    def is_quiet(self, at_s: float) -> bool:
        """Return whether half of the limit has passed at a time."""
        return self._since is not None and at_s - self._since.at_s >= _NEAR * self.limit_s

    def lasts_s(self, at_s: float) -> float:
        """Return the seconds since the last sign of work; 0 before the first."""
        return at_s - self._since.at_s if self._since is not None else 0.0

    def started(self, rank: int, pid: int) -> None:
        """Note a rank that wrote when it started: it may have ended before any look."""
        self._seen.setdefault(rank, RankSign(rank, pid, "X", 0.0, ""))

    def with_ended(self, look: Look) -> Look:
        """Return a look that also has the ranks that ended before it, in their last state."""
        present = {one.rank for one in look.ranks}
        ended = [one for rank, one in sorted(self._seen.items()) if rank not in present]
        return look._replace(ranks=(*look.ranks, *ended))

    @property
    def limit_s(self) -> float:
        """Return how long a silence without weaker signs may last, in seconds."""
        return self._given_s or max(LEAST_S, _GAPS * self._longest_s)

    @property
    def _stall_s(self) -> float:
        return min(STALL_S, _NEAR * self.limit_s)

    def _note_end(self, lasted_s: float) -> None:
        self._longest_s = max(self._longest_s, lasted_s)
        self._run.silence_s = max(self._run.silence_s, lasted_s)

    def _works(self, since: Look, look: Look) -> bool:
        waits_for_person = any(one.waits_in == TERMINAL for one in look.ranks)
        if waits_for_person and self._given_s is None:
            return True
        new = {one.pid for one in look.ranks} - {one.pid for one in since.ranks}
        return look.work != since.work or bool(new)

    def _is_too_long(self, since: Look, look: Look) -> bool:
        if self._given_s is not None:
            return look.at_s - since.at_s >= self._given_s
        quiet_s = look.at_s - max(since.at_s, self._busy_at_s)
        return quiet_s >= self.limit_s or look.at_s - since.at_s >= _BUSY * self.limit_s


def _is_busy(last: Look, look: Look) -> bool:
    """Return whether the job shows a weaker sign of work between two looks."""
    elapsed_s = look.at_s - last.at_s
    if look.cpu_s - last.cpu_s > CORES * elapsed_s or look.beside - last.beside > RATE * elapsed_s:
        return True
    return look.naps or any(_OWN_TIME.search(one.waits_in) for one in look.ranks)
