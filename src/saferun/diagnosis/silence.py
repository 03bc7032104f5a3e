"""Pure: when a job that shows no sign of work may hang, and which of its ranks is elsewhere.

A sign of work is a byte read or written by any process of the job: output, steps, data, compiled
kernels and checkpoints all are. CPU time alone is none where a limit is given: a rank in an
endless loop uses it, too, and so do ranks that wait for a GPU. Without a given limit it lengthens
the limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from saferun.diagnosis.evidence import Hang
from saferun.named_tuple import NamedTuple

LEAST_S = 600.0  # of the limit, where none is given
_GAPS = 10  # times the longest ordinary gap, where no limit is given
_BUSY = 3  # times longer, where no limit is given and the ranks use CPU time
_CORES = 0.1  # above this a rank computes
STOPPED, UNINTERRUPTIBLE = "Tt", "D"
_COMPUTES = "computes on"

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SPIED = re.compile(r"^    (.+) \((.+\.py):(\d+)\)$", re.MULTILINE)
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python3[.\d]*/|<frozen ")
_COLLECTIVE = re.compile(r"/torch/(distributed|nn/parallel|autograd)/")


class RankSign(NamedTuple):
    """One rank, as /proc shows it."""

    rank: int | None
    pid: int
    state: str  # proc_pid_stat(5): R, S, D, T, …
    cpu_s: float  # used so far
    waits_in: str  # the kernel function or system call; "" if unknown


class Look(NamedTuple):
    """One look at a job."""

    at_s: float  # any clock that does not jump
    work: tuple[int, ...]  # differs where any process of the job has read or written
    ranks: tuple[RankSign, ...]


class Place(NamedTuple):
    """Where a rank is."""

    rank: int | None
    pid: int
    what: str  # a clause for people
    frame: str = ""  # "train.py:33 in step", of the script's own code where it has any
    collective: bool = False  # it is in a collective of torch
    odd: bool = False  # it is elsewhere than the others


class Silence:
    """The gaps between a job's signs of work.

    Args:
        limit_s: how long a silence may last; None to follow the job's own rhythm.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._since: Look | None = None  # the last look with a new sign
        self._last_s = 0.0
        self._longest_s = 0.0
        self._reported = False

    def take(self, look: Look, every_s: float) -> Look | None:
        """Return the look with which a silence began that is too long by now; each once.

        Args:
            look: the newest one.
            every_s: the time between looks; after a longer gap nobody was looking.
        """
        since = self._since
        slept = look.at_s - self._last_s > 3 * every_s + 5
        self._last_s = look.at_s
        pids = {one.pid for one in look.ranks}
        changed = since is None or look.work != since.work or pids - {r.pid for r in since.ranks}
        if since is None or changed or slept:
            if since is not None and not slept:
                self._longest_s = max(self._longest_s, look.at_s - since.at_s)
            self._since, self._reported = look, False
            return None
        if self._reported or look.at_s - since.at_s < self.limit_s(since, look):
            return None
        self._reported = True
        return since

    def limit_s(self, since: Look, now: Look) -> float:
        """Return how long this silence may last, in seconds."""
        if self._limit_s is not None:
            return self._limit_s
        limit_s = max(LEAST_S, _GAPS * self._longest_s)
        used_s = sum(one.cpu_s for one in now.ranks) - sum(one.cpu_s for one in since.ranks)
        busy = used_s > _CORES * (now.at_s - since.at_s)
        return limit_s * _BUSY if busy else limit_s


def places(since: Look, now: Look, stacks: Mapping[int, str]) -> list[Place]:
    """Return where each rank is, and which is elsewhere than the others.

    Args:
        since: the look with which the silence began.
        now: the newest look.
        stacks: pid -> what faulthandler wrote, for the ranks that could be asked.
    """
    current = {one.pid: one for one in now.ranks}
    elapsed_s = max(now.at_s - since.at_s, 0.001)
    found = []
    for old in since.ranks:
        one = current.get(old.pid)
        what = "has ended" if one is None else _what(one, (one.cpu_s - old.cpu_s) / elapsed_s)
        stack = _main_thread(stacks.get(old.pid, ""))
        together = one is not None and bool(_COLLECTIVE.search(stack))
        found.append(Place(old.rank, old.pid, what, _frame(stack), together))
    odd = _odd([_kind(place, current) for place in found])
    return [place._replace(odd=at in odd) for at, place in enumerate(found)]


def cause(found: Sequence[Place]) -> Hang:
    """Return what ends an attempt that hangs: ranks in different collectives, or one elsewhere."""
    frames = {place.frame for place in found}
    if len(frames) > 1 and all(place.collective for place in found):
        lines = "; ".join(f"rank {place.rank} at {place.frame}" for place in found[:4])
        odd = next((place.rank for place in found if place.odd), None)
        return Hang("collective-mismatch", odd, lines)
    first = next((place for place in found if place.odd), found[0])
    at = f" at {first.frame}" if first.frame else ""
    return Hang("hang", first.rank if first.odd else None, f"{first.what}{at}")


def from_py_spy(text: str) -> str:
    """Return the main thread's Python frames of a `py-spy dump` as faulthandler writes them."""
    threads = re.split(r"^(?=Thread )", text, flags=re.MULTILINE)
    main = next((one for one in threads if '"MainThread"' in one.partition("\n")[0]), "")
    return "".join(
        f'  File "{path}", line {n} in {name}\n' for name, path, n in _SPIED.findall(main)
    )


def _what(one: RankSign, cores: float) -> str:
    where = f" in {one.waits_in}" if one.waits_in else ""
    if one.state in STOPPED:
        return "is stopped, by a signal or a debugger"
    if one.state in UNINTERRUPTIBLE:
        return f"waits{where}, and no signal can end it"
    computes = cores > _CORES or one.state == "R"
    return f"{_COMPUTES} {cores:.1f} cores" if computes else f"waits{where}"


def _kind(place: Place, current: Mapping[int, RankSign]) -> tuple[int, str]:
    """Return how unusual a rank's place is in a hang, and the place: equal for ranks together."""
    one = current.get(place.pid)
    if one is None or one.state in (*STOPPED, *UNINTERRUPTIBLE):
        return 2, place.what
    if place.frame:
        return (0 if place.collective else 1), place.frame
    return 0, _COMPUTES if place.what.startswith(_COMPUTES) else place.what


def _odd(kinds: Sequence[tuple[int, str]]) -> set[int]:
    """Return the places of those who are elsewhere; none where all are together."""
    if len(set(kinds)) < 2:
        return set()
    worst = max(level for level, _ in kinds)
    if worst > min(level for level, _ in kinds):
        return {at for at, kind in enumerate(kinds) if kind[0] == worst}
    counts = {kind: kinds.count(kind) for kind in kinds}
    least = min(counts.values())
    if least == max(counts.values()):  # two places with as many ranks: nobody is the odd one
        return set()
    return {at for at, kind in enumerate(kinds) if counts[kind] == least}


def _main_thread(stack: str) -> str:
    """Return the part of the thread that took the signal: the main one, wherever it is not busy."""
    parts = re.split(r"^(?=Thread 0x|Current thread 0x)", stack, flags=re.MULTILINE)
    current = [part for part in parts if part.startswith("Current thread")]
    return (current or parts)[-1]


def _frame(stack: str) -> str:
    """Return the innermost frame of the script's own code, else the innermost one."""
    frames = _FRAME.findall(stack)
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    for path, line, name in (own or frames)[:1]:
        return f"{path}:{line} in {name}"
    return ""


def report(found: Sequence[Place], silent: str, *, most: int = 12) -> list[str]:
    """Return the lines about a job that may hang, those who are elsewhere first.

    Args:
        found: from `places`.
        silent: the length of the silence, for people; "" where a person has asked.
        most: of the ranks to show.
    """
    lines = ["where the ranks are:"]
    if silent:
        lines = [f"no output and no input or output of any rank for {silent}: the job may hang"]
    for place in sorted(found, key=lambda place: not place.odd)[:most]:
        name = "the job" if place.rank is None else f"rank {place.rank}"
        at = f", at {place.frame}" if place.frame else ""
        mark = "  <- elsewhere" if place.odd else ""
        lines.append(f"  {name} (pid {place.pid}) {place.what}{at}{mark}")
    if len(found) > most:
        lines.append(f"  and {len(found) - most} more")
    return lines
