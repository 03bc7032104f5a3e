"""Pure: where the ranks of a job are, and which of them is not where the others are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from saferun.diagnosis.silence import CORES, FOR_CHILD, RATE, Look, RankSign

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
LIBRARY = re.compile(  # the last ones are compiled by inductor
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
    if now.naps or used.runs or used.cpu_s > CORES * elapsed_s:
        return True
    if now.beside - before.beside > RATE * elapsed_s:
        return True
    pids = {place.pid for place in found if place.odd}
    return any(place.odd and place.what == _AT_GPU for place in found) or any(
        one.pid in pids
        and (
            one.state in (*UNINTERRUPTIBLE, DEBUGGED)
            or bool(FOR_CHILD.search(one.waits_in) or _FOR_FILE.search(one.waits_in))
        )
        for one in now.ranks
    )


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


def _helper(helper: Helper, stacks: Mapping[int, str]) -> str:
    """Return a clause about a worker; "" if it waits for work in a library's code."""
    frame = _frame(_main_thread(stacks.get(helper.pid, "")), own=True)
    if not frame and helper.state not in _HELD:
        return ""
    what = _what(RankSign(None, helper.pid, helper.state, 0.0, helper.waits_in), 0.0)
    return f"its worker (pid {helper.pid}) {what}" + (f", at {frame}" if frame else "")


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
    computes = cores > CORES or one.state == "R"
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
    of_script = [frame for frame in frames if not LIBRARY.search(frame[0])]
    for path, line, name in (of_script or ([] if own else frames))[:1]:
        return f"{path}:{line} in {name}"
    return ""


def _call(stack: str) -> str:
    """Return the collective of torch that a rank is in; "" if its stack does not name it."""
    names = (name for path, _, name in _FRAME.findall(stack) if path.endswith(_C10D))
    return next((name for name in names if not name.startswith("_")), "")
