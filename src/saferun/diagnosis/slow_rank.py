"""Pure: find the rank that the others wait for in nearly every step, by torch's flight recorder.

A collective of gloo begins when the host calls it, so the times of the calls (by one machine's
clock) show which rank comes last. A collective of NCCL is only queued by the call, and a rank that
queues late need not be late on its GPU. With NCCL the durations count, if torch measures them: the
last rank finds the others waiting, so its collective is the shortest. Without durations, the calls
give only a suspicion.

A rank's cost in a step is its largest delay after the last but one rank in any collective of the
step. It is not the sum, since the others may work while a collective runs. The cost is a lower
bound of the job's loss: if ranks wait for each other many times in a step, the job loses more, and
a slow rank may be missed. A rank is named only if nothing else explains that it comes last:

- It is far behind in most steps, unlike a rank that saves or evaluates from time to time.
- It waits for nobody itself: with several kinds of groups, a rank that it delays is late elsewhere.
- There are no sends between ranks: in a pipeline some stages end later than others by design.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from saferun.diagnosis import flight_record
from saferun.diagnosis.flight_record import Call

SHARE = 0.1  # of the time; a rank that costs less is not named
OFTEN = 0.8  # part of the record's parts in which it must be the last
FEWEST = 200  # fewest collectives of a group
_PARTS = 10
_STEPS = 10  # fewest steps
_SAME = 0.95  # part of the collectives that must equal those of the previous step
# Collectives in which every rank waits for every other one.
_TOGETHER = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier")


@dataclass(frozen=True, slots=True)
class Times:
    """The times at which one rank called its collectives."""

    groups: Mapping[str, Mapping[int, Call]]  # group -> number in the group -> call
    is_nccl: bool = False
    sends: bool = False  # it sends to or receives from other ranks


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that the others wait for."""

    rank: int
    share: float  # part of the job's time that it costs
    calls: int  # number of collectives that were compared
    is_proven: bool = True  # False if only the calls of NCCL show it


@dataclass(frozen=True, slots=True)
class _Part:
    """Some consecutive steps."""

    costs: Mapping[int, float]  # rank -> part of the time that it costs
    waits: Mapping[int, float]  # rank -> part of the time that it waits


def read(content: bytes) -> Times | None:
    """Return the times in a flight recorder's dump; None if it is something else.

    Args:
        content: the file's content, which is not trusted.
    """
    if (dump := flight_record.read(content)) is None:
        return None
    is_nccl = any(call.backend == "nccl" for call in dump.calls)
    groups: dict[str, dict[int, Call]] = {}
    for call in dump.calls:
        together = call.at_s and any(word in call.name for word in _TOGETHER)
        if together and (call.backend == "nccl") == is_nccl:
            group = f"{call.group} {dump.members.get(call.group)}"  # a mesh's rows have one name
            groups.setdefault(group, {})[call.number] = call
    return Times(groups, is_nccl, dump.sends)


def wants_durations(times: Mapping[int, Times]) -> bool:
    """Return whether there are NCCL ranks that do not measure their collectives."""
    calls = (call for one in times.values() for of in one.groups.values() for call in of.values())
    return any(one.is_nccl for one in times.values()) and all(c.lasts_s is None for c in calls)


def judge(times: Mapping[int, Times]) -> Slow | None:
    """Return the rank that the others wait for; None if there is none, or it cannot be told.

    Args:
        times: rank -> its times, for the ranks of one machine.
    """
    if len(times) < 2 or any(one.sends for one in times.values()):
        return None
    timed = not wants_durations(times)
    is_nccl = any(one.is_nccl for one in times.values())
    found: list[Slow] = []
    waits: dict[int, float] = {}
    for group in sorted({name for one in times.values() for name in one.groups}):
        of = {rank: one.groups[group] for rank, one in times.items() if group in one.groups}
        numbers = _common(of, timed=timed and is_nccl)
        parts = _parts(of, numbers, timed=timed and is_nccl) if len(of) > 1 else []
        if not parts:
            continue
        for rank in of:
            waited = statistics.median(part.waits[rank] for part in parts)
            waits[rank] = waits.get(rank, 0.0) + waited
        if slow := _last(parts, len(numbers)):
            found.append(replace(slow, is_proven=timed or not is_nccl))
    held = {one.rank: one for one in sorted(found, key=lambda one: one.share)}
    free = [one for rank, one in held.items() if waits[rank] <= one.share / 2]
    return free[0] if len(free) == 1 else None


def _common(of: Mapping[int, Mapping[int, Call]], *, timed: bool) -> list[int]:
    """Return the numbers of the collectives that all ranks recorded with the same name and size."""
    first, *others = of.values()
    numbers = sorted(number for number in first if all(number in calls for calls in others))
    if any(len({calls[number].name for calls in of.values()}) > 1 for number in numbers):
        return []  # the groups are not the same one
    if timed:
        numbers = [n for n in numbers if all(c[n].lasts_s is not None for c in of.values())]
    return numbers


def _parts(
    of: Mapping[int, Mapping[int, Call]], numbers: Sequence[int], *, timed: bool
) -> list[_Part]:
    """Return the costs and waits in each part of a record; [] if it is too short."""
    steps = _steps(next(iter(of.values())), numbers) if len(numbers) >= FEWEST else []
    if len(steps) <= _STEPS:
        return []
    size = (len(steps) - 1) // _PARTS
    return [
        _part(of, steps[start : start + size + 1], timed=timed)
        for start in range(0, size * _PARTS, size)
    ]


def _steps(calls: Mapping[int, Call], numbers: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of the collectives of each step.

    A step's collectives come again in the next one. If all collectives are alike, a step ends with
    a long pause.
    """
    forms = [(calls[number].name, calls[number].sizes) for number in numbers]
    for period in range(1, len(forms) // _STEPS + 1):
        same = sum(one == again for one, again in zip(forms, forms[period:], strict=False))
        if same >= _SAME * (len(forms) - period):
            break
    else:
        return []
    if period > 1:
        return [numbers[at : at + period] for at in range(0, len(numbers) - period + 1, period)]
    pauses = [calls[b].at_s - calls[a].at_s for a, b in itertools.pairwise(numbers)]
    long_s = sorted(pauses)[int(0.98 * len(pauses))] / 2
    ends = [at + 1 for at, pause in enumerate(pauses) if pause >= long_s]
    return [numbers[a:b] for a, b in itertools.pairwise([0, *ends, len(numbers)])]


def _part(
    of: Mapping[int, Mapping[int, Call]], steps: Sequence[Sequence[int]], *, timed: bool
) -> _Part:
    """Return the costs and waits in some steps; of the last step only the start is used."""
    clock = next(iter(of.values()))
    over_s = max(1e-9, clock[steps[-1][0]].at_s - clock[steps[0][0]].at_s)
    costs, waits = dict.fromkeys(of, 0.0), dict.fromkeys(of, 0.0)
    for step in steps[:-1]:
        behind, waited = dict.fromkeys(of, 0.0), dict.fromkeys(of, 0.0)
        for number in step:
            at = {rank: _arrival(calls[number], timed=timed) for rank, calls in of.items()}
            *_, before, last = sorted(at, key=lambda rank: at[rank])
            behind[last] = max(behind[last], at[last] - at[before])
            for rank in of:
                waited[rank] = max(waited[rank], at[last] - at[rank])
        for rank in of:
            costs[rank] += behind[rank] / over_s
            waits[rank] += waited[rank] / over_s
    return _Part(costs, waits)


def _arrival(call: Call, *, timed: bool) -> float:
    """Return when a rank came to a collective; by GPU time, relative to the common end."""
    return -(call.lasts_s or 0.0) if timed else call.at_s


def _last(parts: Sequence[_Part], calls: int) -> Slow | None:
    """Return the rank that is behind in most parts, and its cost."""
    found: dict[int, int] = {}
    for part in parts:
        rank, cost = max(part.costs.items(), key=lambda one: one[1])
        if cost > SHARE / 2 and cost >= OFTEN * sum(part.costs.values()):
            found[rank] = found.get(rank, 0) + 1
    if not found:
        return None
    rank = max(found, key=lambda one: found[one])
    share = statistics.median(part.costs[rank] for part in parts)
    if found[rank] < OFTEN * len(parts) or share <= SHARE:
        return None
    return Slow(rank, round(share, 3), calls)  # what is said and what is recorded are one number


def sentence(slow: Slow, facts: Sequence[str]) -> str:
    """Return a sentence on the slow rank, and how its GPU and CPU differ from the others'.

    Args:
        slow: the slow rank.
        facts: the differences; empty if there are none or they are unknown.
    """
    text = (
        f"rank {slow.rank} is slow: the others waited for it throughout the last {slow.calls} "
        f"collectives, and the job loses {slow.share:.0%} of its time by it"
    )
    return f"{text}; {'; '.join(facts)}" if facts else text
