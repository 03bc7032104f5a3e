"""Pure: when a job without signs of work may hang, and which of its ranks is elsewhere.

A sign of work is a byte that any process of the job reads or writes: output, steps, data, compiled
kernels and checkpoints all cause some. Weaker signs are CPU time, a GPU in use, network bytes, a
sleep, and the work of other programs below a rank: a rank in an endless loop also uses the CPU, and
so do ranks that wait for a GPU. If a limit is given, weaker signs do not count. Without one they
do, for `_BUSY` times the limit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from saferun.diagnosis.evidence import Hang

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
_CORES = 0.1  # a rank that uses more is computing
RATE = 64 * 1024  # bytes/s; more than libraries exchange to keep in contact
TERMINAL = "a read from the terminal"
_FOR_CHILD = re.compile(r"^(?:do_wait|wait4|waitid)$")
_OWN_TIME = re.compile(rf"nanosleep|{_FOR_CHILD.pattern}")  # a sleep, or a wait for a child
# Waits for a file system in user space, such as a bucket that is mounted: their state is S, since a
# signal may end them (fs/fuse/dev.c, `request_wait_answer`).
_FOR_FILE = re.compile(r"^(?:request_wait_answer|fuse_\w+)")
STOPPED, UNINTERRUPTIBLE = "Tt", "D"
DEBUGGED = "t"  # in a debugger, whose user may take any time
_HELD = (*STOPPED, *UNINTERRUPTIBLE)  # such a process takes part in nothing
_COMPUTES = "computes on"
_AT_GPU = "waits for its GPU"
_WAITS = 1  # the level of _kind up to which a rank only waits

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SPIED = re.compile(r"^    (.+) \((.+\.py):(\d+)\)$", re.MULTILINE)
_LIBRARY = re.compile(  # the last ones are compiled by inductor
    r"/site-packages/|/dist-packages/|/lib/python3[.\d]*/|<frozen "
    r"|/(?:saferun|hooks)/(?:base|inject)/|/[a-z2-7]{2}/c[a-z2-7]{51}\.py$"
)
_C10D = "/torch/distributed/distributed_c10d.py"
_COLLECTIVE = re.compile(r"/torch/(distributed|nn/parallel|autograd)/")
_WAITS_FOR_GPU = re.compile(r"/torch/cuda/(?:__init__|streams)\.py$")
# Calls that return when a GPU has finished, or, for a launch, when its queue has room.
_GPU_CALL = re.compile(
    r"^    (?:cuda|cu|hip)(?:(?:Ctx|Device|Stream|Event)Synchronize|LaunchKernel|Memcpy)\w* \(",
    re.MULTILINE,
)


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


class Used(NamedTuple):
    """The resources that some ranks, and all that they started, have used."""

    cpu_s: float  # includes ended processes
    runs: bool  # one of them is on a CPU, or waits for one


class Helper(NamedTuple):
    """A process that a rank has started from its own program, such as a DataLoader worker."""

    parent: int  # pid of the rank
    pid: int
    state: str
    waits_in: str


class Place(NamedTuple):
    """The place where a rank is."""

    rank: int | None
    pid: int
    what: str  # a clause for people
    frame: str = ""  # "train.py:33 in step", in the script's own code if possible
    collective: bool = False  # it is in a collective of torch
    odd: bool = False  # it is not where the others are
    helpers: tuple[str, ...] = ()  # clauses about its workers that are running the script's code
    call: str = ""  # its collective: "all_reduce"; "" if unknown


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
    """Return where each rank is, and which rank is not where the others are.

    Args:
        since: the look with which the silence began.
        now: the newest look.
        stacks: pid -> stack from faulthandler, for the ranks that could be asked and, if known,
            their helpers.
        helpers: processes with the ranks' own program that they started.
        behind: ranks that are elsewhere according to torch's own record.
        at_gpu: pids of processes whose C++ stack waits for a GPU.
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
    """Return whether a rank's own stack shows that it is in a collective or waits for its GPU."""
    return place.collective or place.what == _AT_GPU


def functions(found: Sequence[Place]) -> set[str]:
    """Return the script's functions in which the ranks are that others wait for."""
    return {
        re.sub(r":\d+ in ", " in ", place.frame) for place in found if place.odd and place.frame
    }


def works(found: Sequence[Place], before: Look, now: Look, used: Used) -> bool:
    """Return whether the ranks that others wait for show a weaker sign of work between looks.

    A sleep is none: it moves nothing, and the others wait for it all the same. The waiting ranks'
    activity does not count: with NCCL, waiting keeps a core and a GPU busy.

    Args:
        found: the result of `places`.
        before: the earlier look.
        now: a look at least some seconds later.
        used: resources that those ranks used between the two looks.
    """
    elapsed_s = max(now.at_s - before.at_s, 0.001)
    if now.naps or used.runs or used.cpu_s > _CORES * elapsed_s:
        return True
    if now.beside - before.beside > RATE * elapsed_s:
        return True
    pids = {place.pid for place in found if place.odd}
    return any(place.odd and place.what == _AT_GPU for place in found) or any(
        one.pid in pids
        and (
            one.state in (*UNINTERRUPTIBLE, DEBUGGED)
            or bool(_FOR_CHILD.search(one.waits_in) or _FOR_FILE.search(one.waits_in))
        )
        for one in now.ranks
    )


def _helper(helper: Helper, stacks: Mapping[int, str]) -> str:
    """Return a clause about a worker; "" if it waits for work in a library's code."""
    frame = _frame(_main_thread(stacks.get(helper.pid, "")), own=True)
    if not frame and helper.state not in _HELD:
        return ""
    what = _what(RankSign(None, helper.pid, helper.state, 0.0, helper.waits_in), 0.0)
    return f"its worker (pid {helper.pid}) {what}" + (f", at {frame}" if frame else "")


def waiting(found: Sequence[Place], silent: str, call: str = "", elsewhere: str = "") -> str:
    """Return who waits for whom, as a line for people; "" if unknown.

    Args:
        found: the result of `places`.
        silent: the length of the silence, for people.
        call: the collective in which the others wait, by torch's own record; "" if unknown.
        elsewhere: a clause about a rank on another machine for which all of these ranks wait.
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
    """Return why a hanging attempt is ended: ranks in different collectives, or one elsewhere.

    Args:
        found: the result of `places`.
        recorded: the hang according to torch's own record.
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
    """Return the main thread's Python frames of a `py-spy dump`, in faulthandler's format.

    py-spy prints a function's qualified name, faulthandler only its last part.
    """
    return "".join(
        f'  File "{path}", line {n} in {name.rpartition(".")[2]}\n'
        for name, path, n in _SPIED.findall(_spied_main(text))
    )


def waits_for_gpu(text: str) -> bool:
    """Return whether the main thread in a `py-spy dump --native` waits for its GPU."""
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
    """Return how unusual a rank's place is in a hang, and the place; ranks together are equal."""
    one = current.get(place.pid)
    if one is None or one.state in _HELD:
        return 3, place.what
    if place.frame:
        waits = _WAITS if place.what == _AT_GPU else _WAITS + 1
        return (0 if place.collective else waits), place.frame
    return 0, _COMPUTES if place.what.startswith(_COMPUTES) else place.what


def _odd(kinds: Sequence[tuple[int, str]]) -> set[int]:
    """Return the indices of the places that differ from the others; none if all are together."""
    if len(set(kinds)) < 2:
        return set()
    levels = [level for level, _ in kinds]
    counts = [kinds.count(kind) for kind in kinds]
    if max(levels) <= _WAITS or min(levels) == max(levels):
        if min(counts) < max(counts):
            return {at for at, count in enumerate(counts) if count == min(counts)}
        if min(levels) == max(levels):  # two places with equally many ranks: neither is odd
            return set()
    return {at for at, level in enumerate(levels) if level == max(levels)}


def _main_thread(stack: str) -> str:
    """Return the stack of the thread that took the signal: the main one, unless that is busy."""
    parts = re.split(r"^(?=Thread 0x|Current thread 0x)", stack, flags=re.MULTILINE)
    current = [part for part in parts if part.startswith("Current thread")]
    return (current or parts)[-1]


def _frame(stack: str, *, own: bool = False) -> str:
    """Return the innermost frame in the script's own code, or, unless `own`, in any code."""
    frames = _FRAME.findall(stack)
    of_script = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    for path, line, name in (of_script or ([] if own else frames))[:1]:
        return f"{path}:{line} in {name}"
    return ""


def _call(stack: str) -> str:
    """Return the collective of torch that a rank is in; "" if its stack does not name it."""
    names = (name for path, _, name in _FRAME.findall(stack) if path.endswith(_C10D))
    return next((name for name in names if not name.startswith("_")), "")


def report(
    found: Sequence[Place], silent: str, recorded: Hang | None = None, *, most: int = 12
) -> list[str]:
    """Return lines on a job that may hang; ranks that are not where the others are come first.

    Args:
        found: the result of `places`.
        silent: the length of the silence, for people; "" if a person asked for the report.
        recorded: the hang according to torch's own record.
        most: largest number of ranks to show.
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
