"""Pure: which ranks have launched fewer collectives than others, by NCCL's RAS.

NCCL answers on localhost:28028: from 2.24 on as text for people, from 2.28.7 on as JSON
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html). It counts
launched collectives, so ranks of a healthy job differ for a moment: only a difference that does not
change counts. RAS has called broken jobs healthy (NVIDIA/nccl#1730), so it never overrides another
sign.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from saferun.diagnosis.flight_record import CollectiveFinding

_CALL = "a collective of NCCL"
_MOST = 100_000  # most communicators and ranks that are read


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a communicator."""

    rank: int  # in the communicator
    pid: int
    host: str
    launched: int | None  # collectives of all kinds so far; None if it did not answer
    is_gone: bool = False  # NCCL takes its process for dead, or it did not answer


# By the communicator's name; for a text answer also by the kind of collective, and only
# differences.
Communicators = Mapping[str, tuple[Member, ...]]
_GROUP = re.compile(r"#\d{1,9}-\d{1,9} \(([0-9a-f]{1,16})\) ([A-Z]{1,20})\s*\Z")
_KIND = re.compile(r"  Communicator ranks have different (\w{1,20}) operation counts")
_LAUNCHED = r"(?:launched up to operation (\d{1,18})|not launched any operations)"
_SEVERAL = re.compile(rf"  \d{{1,9}} ranks have {_LAUNCHED}")
_RANK = re.compile(
    rf"  Rank (\d{{1,9}}) (?:has {_LAUNCHED} )?"
    r"-- GPU .{1,80}managed by process (\d{1,9}) on node (\S{1,64})\s*\Z"
)
# NCCL 2.28.9 omits the comma before the status of a missing rank.
_NO_COMMA = re.compile(rb"([^\s,:\[{])(\s{0,99}\n\s{0,99}\")")
_BETWEEN_TWO = ("Send", "Recv", "SendRecv")  # counts may differ between ranks of a pipeline
_OTHERS = -1  # pid for ranks that a text counts without names


def read(content: bytes) -> Communicators | None:
    """Return a parsed answer; None if the content is something else.

    Args:
        content: all bytes that came, which are not trusted.
    """
    if b"\nCommunicators..." in content:
        return _of_text(content.decode("latin-1").splitlines())
    try:
        document = json.loads(_NO_COMMA.sub(rb"\1,\2", content[max(0, content.find(b"{")) :]))
        comms = document["communicators"][:_MOST]
        return {f"{one['hash']}/{one['secondary_hash']}": tuple(_members(one)) for one in comms}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _of_text(lines: list[str]) -> Communicators:
    """Parse a text answer (NVIDIA/nccl, src/ras/client_support.cc, `rasClientRunComms`)."""
    found: dict[str, list[Member]] = {}
    name = section = kind = ""
    count: int | None = None  # of the ranks in the lines that follow
    for line in lines:
        if group := _GROUP.match(line):
            (name, section), kind = group.groups(), ""
        elif of_kind := _KIND.match(line):
            kind = of_kind[1]
        elif several := _SEVERAL.match(line):
            count = int(several[1] or 0)
            if kind:
                found.setdefault(f"{name}/{kind}", []).append(Member(_OTHERS, _OTHERS, "", count))
        elif rank := _RANK.match(line):
            named = " has " in line.partition("--")[0]
            launched = int(rank[2] or 0) if named else count
            gone = section == "INCOMPLETE"
            if kind or gone:
                one = Member(int(rank[1]), int(rank[3]), rank[4], None if gone else launched, gone)
                found.setdefault(f"{name}/{kind or section}", []).append(one)
    return {name: tuple(members) for name, members in found.items()}


def _members(comm: Mapping[str, object]) -> Iterator[Member]:
    """Yield the ranks of a communicator, the missing ones too.

    Raises:
        TypeError, KeyError: the communicator has another form.
    """
    for key in ("ranks", "missing_ranks"):
        found = comm[key]
        for one in found[:_MOST] if isinstance(found, list) else ():
            counts = one.get("collective_counts")
            launched = None
            if isinstance(counts, dict):
                launched = sum(int(n) for kind, n in counts.items() if kind not in _BETWEEN_TWO)
            status = one.get("status") or {}
            gone = bool(status.get("considered_dead") or status.get("unresponsive"))
            yield Member(int(one["rank"]), int(one["pid"]), str(one["host"])[:64], launched, gone)


def compare(
    before: Communicators, after: Communicators, pids: Mapping[int, int], world: int = 0
) -> CollectiveFinding | None:
    """Return the ranks that are behind; None if nothing differs or something moves.

    Args:
        before: the first answer.
        after: the answer some seconds later.
        pids: pid -> rank, of this machine's ranks. An answer without any of them concerns another
            job.
        world: number of the job's ranks; 0 if unknown. In a communicator of all ranks each one has
            its own number, even on other machines and after its end.
    """
    if not any(member.pid in pids for comm in after.values() for member in comm):
        return None
    found = (
        finding
        for name, comm in after.items()
        if _counts(comm) == _counts(before.get(name, ())) and (finding := _of(comm, pids, world))
    )
    return max(found, key=lambda one: (bool(one.gone), len(one.ranks)), default=None)


def _counts(comm: tuple[Member, ...]) -> list[tuple[int, int | None, bool]]:
    return sorted((one.rank, one.launched or 0, one.is_gone) for one in comm)


def _of(comm: tuple[Member, ...], pids: Mapping[int, int], world: int) -> CollectiveFinding | None:
    most = max((one.launched for one in comm if one.launched is not None), default=0)
    gone = [one for one in comm if one.is_gone]
    behind = gone or [one for one in comm if one.launched is not None and one.launched < most]
    named = [one for one in behind if one.pid != _OTHERS]
    counted = {one.launched for one in behind if one.pid == _OTHERS}
    if not named or counted - {one.launched for one in named}:
        return None  # nobody, or ranks that the text does not name
    if len(named) == len(comm) and most:
        return None
    is_world = len(comm) == world and _has_all(comm, pids)
    numbers = [one.rank if is_world else pids.get(one.pid) for one in named]
    known = sorted(number for number in numbers if number is not None)
    ranks = tuple(number for number in known if number in pids.values())
    who = _who(named[0], numbers[0], pids)
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    if gone:
        line = f"{who}{more}: dead, or gives no answer"
        return CollectiveFinding("hang", ranks, line, _CALL, gone=tuple(known))
    line = f"{who}{more} launched {named[0].launched} collectives, others of its group {most}"
    return CollectiveFinding("hang", ranks, line, _CALL)


def _has_all(comm: tuple[Member, ...], pids: Mapping[int, int]) -> bool:
    """Return whether this machine's ranks have their own numbers in a communicator."""
    seen = {(one.pid, one.rank) for one in comm}
    return all(pair in seen for pair in pids.items())


def _who(one: Member, rank: int | None, pids: Mapping[int, int]) -> str:
    if rank is None:
        return f"pid {one.pid} on {one.host}"
    return f"rank {rank}" if pids.get(one.pid) == rank else f"rank {rank} on {one.host}"
