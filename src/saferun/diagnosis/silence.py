"""Pure: when a job that shows no sign of work may hang, and which of its ranks is elsewhere.

A sign of work is a byte read or written by any process of the job: output, steps, data, compiled
kernels and checkpoints all are. Weaker signs are CPU time, a GPU in use, bytes of a network, a
sleep, and what other programs below a rank do: a rank in an endless loop uses the CPU, too, and so
do ranks that wait for a GPU. Where a limit is given they do not count. Without one they do, for
`_BUSY` times the limit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from saferun.diagnosis.evidence import Hang

LEAST_S = 600.0  # the least limit, where none is given
# A silence of several ranks after which it is found out who waits for whom: with the time between
# two looks, and what ranks and NCCL get to answer, less than a minute from its beginning.
STALL_S = 30.0
_LEAST_STALL_S = 10.0  # where a limit is given whose half is less, its end comes soon enough
LOUD_S = 60.0  # the least length of a stall that is told on stderr
# How many times longer than the longest silence of the run it has to be for that: for a rank that
# does nothing, and for one that works.
_LOUDER, _LOUDER_WORKING = 2, 10
GONE_S = 120.0  # of a stall for a rank that is gone, after which the attempt is ended
_GAPS = 10  # times the longest ordinary gap, where no limit is given
_BUSY = 12  # times longer, where no limit is given and there are weaker signs of work
_NEAR = 0.5  # from this part of the limit on, weaker signs that cost more are looked for
_CORES = 0.1  # above this a rank computes
RATE = 64 * 1024  # bytes/s; more than what libraries exchange to know of each other
TERMINAL = "a read from the terminal"
_OWN_TIME = re.compile(r"nanosleep|^(?:do_wait|wait4|waitid)$")  # a sleep, or a wait for a child
STOPPED, UNINTERRUPTIBLE = "Tt", "D"
DEBUGGED = "t"  # by a person, who may take all the time
_HELD = (*STOPPED, *UNINTERRUPTIBLE)  # takes part in nothing
_COMPUTES = "computes on"
_AT_GPU = "waits for its GPU"
_WAITS = 1  # the level of _kind up to which a rank only waits for something

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SPIED = re.compile(r"^    (.+) \((.+\.py):(\d+)\)$", re.MULTILINE)
_LIBRARY = re.compile(  # the last ones are what inductor has compiled
    r"/site-packages/|/dist-packages/|/lib/python3[.\d]*/|<frozen |/(?:saferun|hooks)/inject/"
    r"|/[a-z2-7]{2}/c[a-z2-7]{51}\.py$"
)
_C10D = "/torch/distributed/distributed_c10d.py"
_COLLECTIVE = re.compile(r"/torch/(distributed|nn/parallel|autograd)/")
_WAITS_FOR_GPU = re.compile(r"/torch/cuda/(?:__init__|streams)\.py$")
# Calls that return when a GPU is done; a launch, when its queue has room.
_GPU_CALL = re.compile(
    r"^    (?:cuda|cu|hip)(?:(?:Ctx|Device|Stream|Event)Synchronize|LaunchKernel|Memcpy)\w* \(",
    re.MULTILINE,
)


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
    cpu_s: float = 0.0  # used so far by the ranks and by all that they have started
    beside: int = 0  # bytes read and written so far by other programs that they have started
    naps: bool = False  # one of those programs sleeps


class Used(NamedTuple):
    """What some ranks, and all that they have started, have used."""

    cpu_s: float  # of processes that have ended, too
    runs: bool  # one of them is on a CPU, or waits for one


class Helper(NamedTuple):
    """A process that a rank has started of its own program, such as a DataLoader's worker."""

    parent: int  # pid of the rank
    pid: int
    state: str
    waits_in: str


class Place(NamedTuple):
    """Where a rank is."""

    rank: int | None
    pid: int
    what: str  # a clause for people
    frame: str = ""  # "train.py:33 in step", of the script's own code where it has any
    collective: bool = False  # it is in a collective of torch
    odd: bool = False  # it is elsewhere than the others
    helpers: tuple[str, ...] = ()  # clauses about its workers that are at work of the script's
    call: str = ""  # the collective that it is in: "all_reduce"; "" where that is not known


class Longest:
    """What is known of the silences of a run that have ended.

    Attributes:
        silence_s: the length of the longest one.
        waited_at: the functions in which ranks were that others have waited for.
    """

    def __init__(self) -> None:
        self.silence_s = 0.0
        self.waited_at: set[str] = set()

    def loud_s(self, *, works: bool = False) -> float:
        """Return how long a stall has to be to be told on stderr.

        Args:
            works: the rank that others wait for shows signs of work.
        """
        return max(LOUD_S, (_LOUDER_WORKING if works else _LOUDER) * self.silence_s)


class Silence:
    """The gaps between a job's signs of work.

    Args:
        limit_s: how long a silence may last; None to follow the job's own rhythm.
        longest: those of the run; a longer one is noted there, too.
        least_ranks: of this machine, for a stall.
    """

    def __init__(
        self, limit_s: float | None, longest: Longest | None = None, least_ranks: int = 2
    ) -> None:
        self._given_s = limit_s
        self._run, self._least_ranks = longest or Longest(), least_ranks
        self._since: Look | None = None  # the last look with a new sign
        self._last: Look | None = None
        self._busy_at_s = 0.0  # the last weaker sign
        self._longest_s = 0.0
        self._reported = False
        self.is_stalled = False  # the silence has lasted for as long as a stall
        self.has_slept = False  # nobody was looking before the newest look
        self._answers = False  # the ranks were asked where they are since the last look
        self._seen: dict[int, RankSign] = {}  # rank -> its last sign

    def take(self, look: Look, every_s: float) -> Look | None:
        """Return the look with which a silence began that is too long by now; each once.

        Args:
            look: the newest one.
            every_s: the time between looks; after a longer gap nobody was looking.
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
        """Return the look with which a silence of several ranks began that is a stall; each once.

        Args:
            look: the newest one, which `take` has had.
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
        """Return the look with which the stall began, where it has lasted for so long by now."""
        since = self._since
        if since is None or not self.is_stalled or self._reported:
            return None
        if look.at_s - since.at_s < after_s:
            return None
        return self.with_ended(since)

    def answered(self, look: Look) -> None:
        """Note that the ranks were asked where they are: what they wrote for it is no work.

        What they do until the next look does not count, since an answer may come late.

        Args:
            look: the newest one.
        """
        self._last, self._answers = look, True

    def note_busy(self, at_s: float) -> None:
        """Note a weaker sign of work."""
        self._busy_at_s = at_s

    def look_again_s(self, at_s: float, every_s: float) -> float:
        """Return when to look again: no later than when a silence is a stall, or too long.

        Args:
            at_s: of the last look.
            every_s: the time between looks.
        """
        if self._since is None or self._reported:
            return every_s
        ends = (self._stall_s, self.limit_s)
        left = [left_s for end_s in ends if (left_s := self._since.at_s + end_s - at_s) > 0]
        return min(every_s, *left) if left else every_s

    def is_near(self, look: Look) -> bool:
        """Return whether weaker signs of work would be of use now."""
        return self._given_s is None and not self._reported and self.is_quiet(look.at_s)

    def is_quiet(self, at_s: float) -> bool:
        """Return whether half of the limit is over by then."""
        return self._since is not None and at_s - self._since.at_s >= _NEAR * self.limit_s

    def lasts_s(self, at_s: float) -> float:
        """Return the seconds since the last sign of work; 0 before the first."""
        return at_s - self._since.at_s if self._since is not None else 0.0

    def with_ended(self, look: Look) -> Look:
        """Return a look with the ranks that had ended before it, as they were."""
        present = {one.rank for one in look.ranks}
        ended = [one for rank, one in sorted(self._seen.items()) if rank not in present]
        return look._replace(ranks=(*look.ranks, *ended))

    @property
    def limit_s(self) -> float:
        """How long a silence without weaker signs of work may last, in seconds."""
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
    if look.cpu_s - last.cpu_s > _CORES * elapsed_s or look.beside - last.beside > RATE * elapsed_s:
        return True
    return look.naps or any(_OWN_TIME.search(one.waits_in) for one in look.ranks)


def places(
    since: Look,
    now: Look,
    stacks: Mapping[int, str],
    helpers: Sequence[Helper] = (),
    behind: Sequence[int] = (),
    at_gpu: Collection[int] = (),
) -> list[Place]:
    """Return where each rank is, and which is elsewhere than the others.

    Args:
        since: the look with which the silence began.
        now: the newest look.
        stacks: pid -> what faulthandler wrote, for the ranks that could be asked, and the same of
            their helpers, as far as it is known.
        helpers: what the ranks have started of their own program.
        behind: the ranks that are elsewhere by torch's own record.
        at_gpu: pids of those whose stack of C++ waits for a GPU.
    """
    current = {one.pid: one for one in now.ranks}
    elapsed_s = max(now.at_s - since.at_s, 0.001)
    found = []
    for old in since.ranks:
        one = current.get(old.pid)
        what = "has ended" if one is None else _what(one, (one.cpu_s - old.cpu_s) / elapsed_s)
        stack = _main_thread(stacks.get(old.pid, ""))
        takes_part = one is not None and one.state not in _HELD
        if takes_part and (old.pid in at_gpu or _is_at_gpu(stack)):
            what = _AT_GPU
        together = takes_part and bool(_COLLECTIVE.search(stack))
        beside = tuple(
            clause
            for helper in helpers
            if helper.parent == old.pid and (clause := _helper(helper, stacks))
        )
        call = _call(stack) if together else ""
        frame = _frame(stack)
        found.append(Place(old.rank, old.pid, what, frame, together, helpers=beside, call=call))
    odd = _odd([_kind(place, current) for place in found])
    if behind and set(behind) < {place.rank for place in found}:
        odd = {at for at, place in enumerate(found) if place.rank in behind}
    return [place._replace(odd=at in odd) for at, place in enumerate(found)]


def waits(place: Place) -> bool:
    """Return whether a rank's own stack shows it in a collective, or waiting for its GPU."""
    return place.collective or place.what == _AT_GPU


def functions(found: Sequence[Place]) -> set[str]:
    """Return the functions of the script in which the ranks are that others wait for."""
    return {
        re.sub(r":\d+ in ", " in ", place.frame) for place in found if place.odd and place.frame
    }


def works(found: Sequence[Place], before: Look, now: Look, used: Used) -> bool:
    """Return whether the ranks that others wait for show a weaker sign of work between two looks.

    What the waiting ranks do does not count: those of NCCL keep their core and their GPU busy.

    Args:
        found: from `places`.
        before: a look.
        now: one at least some seconds later.
        used: what those ranks have used between the two.
    """
    elapsed_s = max(now.at_s - before.at_s, 0.001)
    if now.naps or used.runs or used.cpu_s > _CORES * elapsed_s:
        return True
    if now.beside - before.beside > RATE * elapsed_s:
        return True
    pids = {place.pid for place in found if place.odd}
    return any(place.odd and place.what == _AT_GPU for place in found) or any(
        one.pid in pids
        and (one.state in (*UNINTERRUPTIBLE, DEBUGGED) or bool(_OWN_TIME.search(one.waits_in)))
        for one in now.ranks
    )


def _helper(helper: Helper, stacks: Mapping[int, str]) -> str:
    """Return a clause about a worker; "" for one that waits for work, in a library's code."""
    frame = _frame(_main_thread(stacks.get(helper.pid, "")), own=True)
    if not frame and helper.state not in _HELD:
        return ""
    what = _what(RankSign(None, helper.pid, helper.state, 0.0, helper.waits_in), 0.0)
    return f"its worker (pid {helper.pid}) {what}" + (f", at {frame}" if frame else "")


def waiting(found: Sequence[Place], silent: str, call: str = "", elsewhere: str = "") -> str:
    """Return who waits for whom, as a line for people; "" where that is not known.

    Args:
        found: from `places`.
        silent: the length of the silence, for people.
        call: the collective in which the others wait, as torch's own record says; "" without one.
        elsewhere: a clause about a rank of another machine for which all of these wait.
    """
    odd = [place for place in found if place.odd]
    others = [place for place in found if not place.odd]
    if not others or not (call or all(place.collective for place in others)):
        return ""
    name = call or next((place.call for place in others if place.call), "a collective")
    wait = f"{len(others)} ranks wait" if len(others) > 1 else f"rank {others[0].rank} waits"
    if not odd:
        return f"{elsewhere}; {wait} here in {name} ({silent})" if elsewhere else ""
    first, several = odd[0], len(odd) > 1
    where = f"is at {first.frame}" if first.frame else first.what
    more = f" and {len(odd) - 1} more ranks like it" if several else ""
    them = "them" if several else "it"
    return f"rank {first.rank} {where}{more}, {wait} for {them} in {name} ({silent})"


def cause(found: Sequence[Place], recorded: Hang | None = None) -> Hang:
    """Return what ends an attempt that hangs: ranks in different collectives, or one elsewhere.

    Args:
        found: from `places`.
        recorded: what torch's own record says.
    """
    frames = {place.frame for place in found}
    if recorded is not None and recorded.kind != "hang":
        return recorded
    if len(frames) > 1 and all(place.collective for place in found):
        lines = "; ".join(f"rank {place.rank} at {place.frame}" for place in found[:4])
        odd = next((place.rank for place in found if place.odd), None)
        return Hang("collective-mismatch", odd, lines)
    first = next((place for place in found if place.odd), found[0])
    at = f" at {first.frame}" if first.frame else ""
    parts = [f"{first.what}{at}", *first.helpers[:1], *([recorded.line] if recorded else [])]
    return Hang("hang", first.rank if first.odd else None, "; ".join(parts))


def from_py_spy(text: str) -> str:
    """Return the main thread's Python frames of a `py-spy dump` as faulthandler writes them.

    py-spy has a function's qualified name, faulthandler the last part of it.
    """
    return "".join(
        f'  File "{path}", line {n} in {name.rpartition(".")[2]}\n'
        for name, path, n in _SPIED.findall(_spied_main(text))
    )


def waits_for_gpu(text: str) -> bool:
    """Return whether the main thread in a `py-spy dump --native` waits in a call for its GPU."""
    return bool(_GPU_CALL.search(_spied_main(text)))


def _is_at_gpu(stack: str) -> bool:
    frame = _FRAME.search(stack)
    return frame is not None and bool(_WAITS_FOR_GPU.search(frame[1]))


def _spied_main(text: str) -> str:
    threads = re.split(r"^(?=Thread )", text, flags=re.MULTILINE)
    return next((one for one in threads if '"MainThread"' in one.partition("\n")[0]), "")


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
    if one is None or one.state in _HELD:
        return 3, place.what
    if place.frame:
        waits = _WAITS if place.what == _AT_GPU else _WAITS + 1
        return (0 if place.collective else waits), place.frame
    return 0, _COMPUTES if place.what.startswith(_COMPUTES) else place.what


def _odd(kinds: Sequence[tuple[int, str]]) -> set[int]:
    """Return the places of those who are elsewhere; none where all are together."""
    if len(set(kinds)) < 2:
        return set()
    levels = [level for level, _ in kinds]
    counts = [kinds.count(kind) for kind in kinds]
    if max(levels) <= _WAITS or min(levels) == max(levels):
        if min(counts) < max(counts):
            return {at for at, count in enumerate(counts) if count == min(counts)}
        if min(levels) == max(levels):  # two places with as many ranks: nobody is the odd one
            return set()
    return {at for at, level in enumerate(levels) if level == max(levels)}


def _main_thread(stack: str) -> str:
    """Return the part of the thread that took the signal: the main one, wherever it is not busy."""
    parts = re.split(r"^(?=Thread 0x|Current thread 0x)", stack, flags=re.MULTILINE)
    current = [part for part in parts if part.startswith("Current thread")]
    return (current or parts)[-1]


def _frame(stack: str, *, own: bool = False) -> str:
    """Return the innermost frame of the script's own code, else the innermost one unless `own`."""
    frames = _FRAME.findall(stack)
    of_script = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    for path, line, name in (of_script or ([] if own else frames))[:1]:
        return f"{path}:{line} in {name}"
    return ""


def _call(stack: str) -> str:
    """Return the collective of torch that a rank is in; "" where its stack does not name it."""
    names = (name for path, _, name in _FRAME.findall(stack) if path.endswith(_C10D))
    return next((name for name in names if not name.startswith("_")), "")


def report(
    found: Sequence[Place], silent: str, recorded: Hang | None = None, *, most: int = 12
) -> list[str]:
    """Return the lines about a job that may hang, those who are not where the others are first.

    Args:
        found: from `places`.
        silent: the length of the silence, for people; "" where a person has asked.
        recorded: what torch's own record says.
        most: of the ranks to show.
    """
    lines = ["where the ranks are:"]
    if silent:
        lines = [f"no output and no input or output of any rank for {silent}: the job may hang"]
    for shown, place in enumerate(sorted(found, key=lambda place: not place.odd)):
        if len(lines) > most - bool(recorded):
            lines.append(f"  and {len(found) - shown} more")
            break
        name = "the job" if place.rank is None else f"rank {place.rank}"
        at = f", at {place.frame}" if place.frame else ""
        mark = "  <- not where the others are" if place.odd else ""
        lines.append(f"  {name} (pid {place.pid}) {place.what}{at}{mark}")
        lines += [f"    {helper}" for helper in place.helpers[:1] if place.odd]
    if recorded is not None:
        lines.append(f"  torch's flight recorder: {recorded.line}")
    return lines
