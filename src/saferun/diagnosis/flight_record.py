"""Pure: which rank is behind in which collective of a hang, by torch's flight recorder.

torch keeps the last collectives of each rank, each with the place in the script that called it
(torch/csrc/distributed/c10d/FlightRecorder.hpp, torch 2.4 to 2.15), and dumps them as a pickle of
plain containers, or in some cases as JSON. A pickle may call anything, so ours is read by an
unpickler that allows no calls.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from saferun.base import untrusted
from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.places import LIBRARY

_SIZED = {"all_reduce", "broadcast", "reduce", "allreduce_coalesced"}  # equal sizes on all ranks
# Limit for characters, frames, tensors and their sizes. A large object that repeats keeps a pickle
# small, but its text has no end.
_MOST = 1000


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as one rank recorded it."""

    group: str
    number: int  # number of the collective in its group, from 1
    name: str  # "all_reduce"
    sizes: str  # sizes of its input
    state: str = ""  # "scheduled", "started", "completed"
    place: str = ""  # "train.py:33 in step"; "" if unknown
    backend: str = ""  # "nccl", "gloo"
    at_s: float = 0.0  # when the host called it; 0 if unknown
    lasts_s: float | None = None  # duration on the GPU; None if unknown


@dataclass(frozen=True, slots=True)
class Dump:
    """The recorded collectives of one rank."""

    calls: list[Call]
    # Groups of the rank: their ranks, and the number of the last call, as far as the dump tells. If
    # old entries were dropped, only the number remains; it is 0 if nothing was called.
    members: Mapping[str, tuple[int, ...]]
    reached: Mapping[str, int]
    is_empty: bool = False  # it has no entry, as for a rank that is held away from all others
    waits_for_peer: bool = False  # a send or recv of this rank has not ended
    sends: bool = False  # it sends to or receives from other ranks


@dataclass(frozen=True, slots=True)
class CollectiveFinding:
    """The ranks that are elsewhere, by the recorder."""

    kind: str  # kind of the failure: "hang", "collective-mismatch"
    ranks: tuple[int, ...]  # the ranks that are behind; the minority of a mismatch
    line: str  # a clause for people
    call: str = ""  # the collective in which the others wait
    awaited: tuple[int, ...] = ()  # known ranks that have not entered one of their collectives
    gone: tuple[int, ...] = ()  # ranks whose process is dead or does not answer


@dataclass(frozen=True, slots=True)
class _Group:
    """The records of one group's ranks.

    Several groups may have one name: those of a mesh's rows.
    """

    name: str
    of: Mapping[int, Mapping[int, Call]]  # rank -> its calls by number, at least one
    last: Mapping[int, int]  # rank -> number of its last call, if known
    without: tuple[int, ...]  # other ranks of the group, from `pg_config`

    def pending(self, rank: int) -> list[int]:
        return [number for number, call in self.of[rank].items() if call.state != "completed"]

    def missing(self, number: int) -> set[int]:
        return {rank for rank, last in self.last.items() if last < number}

    def waits(self) -> list[Call]:
        """Return the calls that some ranks wait in and others have not entered, by number."""
        found = {number: self.of[rank][number] for rank in self.of for number in self.pending(rank)}
        return [call for number, call in sorted(found.items()) if self.missing(number)]


class _Plain(pickle.Unpickler):
    """Read containers, text and numbers; refuse everything else."""

    def find_class(self, module: str, name: str, /) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")

    def persistent_load(self, pid: object, /) -> object:
        raise pickle.UnpicklingError("a reference in a dump")


def _load(content: bytes) -> tuple[dict[str, object], list[dict[str, object]]] | None:
    """Return a dump and its entries; None if it is incomplete or something else.

    Args:
        content: the file's content, which is not trusted.
    """
    try:
        dump: object = (
            json.loads(content) if content[:1] == b"{" else _Plain(io.BytesIO(content)).load()
        )
    except Exception:  # a broken pickle may raise anything
        return None
    entries = dump.get("entries", []) if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not isinstance(dump, dict):
        return None
    return dump, [entry for entry in entries if isinstance(entry, dict)]


def read(content: bytes) -> Dump | None:
    """Return a dump's collectives and groups; None if it is not a complete dump.

    Args:
        content: the file's content, which is not trusted.
    """
    if (loaded := _load(content)) is None:
        return None
    dump, entries = loaded
    members = _members(dump.get("pg_config"))
    is_whole = not entries or entries[0].get("record_id") == 0  # no entry was dropped
    reached = _reached(dump.get("pg_status"), members, is_whole=is_whole)
    calls = [call for entry in entries for call in _calls(entry)]
    waits = any(_is_pending_peer(entry) for entry in entries)
    sends = any(entry.get("is_p2p") is True for entry in entries)
    return Dump(calls, dict(members.values()), reached, not entries, waits, sends)


def _members(config: object) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (the group's name as in Call, its ranks), for each group of a dump."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    groups = list(config.items())[:_MOST] if isinstance(config, dict) else []
    for name, one in groups:
        ranks = _text(one.get("ranks")) if isinstance(one, dict) else ""
        if ranks.startswith("[") and (numbers := re.findall(r"\d{1,9}", ranks)):
            group = _group([name, one.get("desc")])
            found[_text(name)] = group, tuple(map(int, numbers))
    return found


def _reached(
    status: object, members: Mapping[str, tuple[str, tuple[int, ...]]], *, is_whole: bool
) -> dict[str, int]:
    """Return the number of each group's last called collective, if known.

    torch names the groups of `pg_status` by numbers, which are names of `pg_config` as well.
    """
    found = {group: 0 for group, _ in members.values()} if is_whole else {}
    for name, (group, _) in members.items():
        one = status.get(name) if isinstance(status, dict) else None
        last = one.get("last_enqueued_collective") if isinstance(one, dict) else None
        if _is_number(last):
            found[group] = last
    return found


def _group(names: Iterable[object]) -> str:
    """Return the name of a group."""
    texts = [text for part in names if (text := _text(part)) not in ("", "undefined")]
    return ":".join(texts[-1:] if "default_pg" in texts else texts)


def _calls(entry: Mapping[str, object]) -> Iterator[Call]:
    group, number = entry.get("process_group"), entry.get("collective_seq_id")
    if entry.get("is_p2p") or not _is_number(number) or not isinstance(group, (list, tuple)):
        return
    backend, _, name = _text(entry.get("profiling_name")).rpartition(":")
    at, lasts = entry.get("time_created_ns"), entry.get("duration_ms")
    sizes, state = _sizes(entry.get("input_sizes")), _text(entry.get("state"))
    if entry.get("retired"):  # the only mark of an end that gloo's have
        state = "completed"
    yield Call(
        _group(group[:_MOST]), number, name, sizes, state, _place(entry.get("frames")), backend,
        at / 1e9 if _is_number(at) else 0.0,
        lasts / 1000 if isinstance(lasts, float) and lasts >= 0 else None,
    )  # fmt: skip


def _is_pending_peer(entry: Mapping[str, object]) -> bool:
    is_open = entry.get("state") != "completed" and not entry.get("retired")
    return bool(entry.get("is_p2p")) and is_open


def _is_number(value: object) -> TypeGuard[int]:
    """Return whether a value of a dump is a count or a time that can be right."""
    return untrusted.is_count(value, 1 << 63)


def _text(value: object) -> str:
    return value[:_MOST] if isinstance(value, str) else ""


def _sizes(value: object) -> str:
    """Return the sizes of tensors as Python prints them; "" for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) > _MOST:
        return ""
    if not all(isinstance(sizes, (list, tuple)) for sizes in value):
        return ""
    numbers = list(itertools.islice(itertools.chain(*value), _MOST + 1))
    return str(value) if len(numbers) <= _MOST and all(map(_is_number, numbers)) else ""


def _place(frames: object) -> str:
    """Return the innermost frame of the script's own code."""
    for frame in frames[:_MOST] if isinstance(frames, list) else ():
        path = _text(frame.get("filename")) if isinstance(frame, dict) else ""
        if path.startswith("/") and not LIBRARY.search(path):
            line = frame.get("line")
            return f"{path}:{line if _is_number(line) else '?'} in {_text(frame.get('name'))}"
    return ""


def compare(dumps: Mapping[int, Dump], asked: Collection[int] = ()) -> CollectiveFinding | None:
    """Return the ranks that are elsewhere; None if the dumps do not tell.

    Args:
        dumps: rank -> its dump.
        asked: the ranks that were asked for a dump; the others may wait for one that gave none.
    """
    groups = _groups(dumps, asked)
    for group in groups:  # a mismatch is the cause of the other findings
        if mismatch := _mismatch_of(group):
            return mismatch
    if found := _behind_of(groups, dumps):
        return found
    states = [finding for group in groups for finding in _states_of(group)]
    return min(states, key=lambda one: not one.ranks, default=None)


def _groups(dumps: Mapping[int, Dump], asked: Collection[int]) -> list[_Group]:
    listed: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, ranks in dump.members.items():
            listed.setdefault(name, set()).add(ranks)
    found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Call]]] = {}
    for rank, dump in sorted(dumps.items()):
        for call in dump.calls:
            others = (ranks for ranks in sorted(listed.get(call.group, ())) if rank in ranks)
            ranks = dump.members.get(call.group) or next(others, ())
            found.setdefault((call.group, ranks), {}).setdefault(rank, {})[call.number] = call
    return [_group_of(name, ranks, of, dumps, asked) for (name, ranks), of in found.items()]


def _group_of(
    name: str,
    ranks: tuple[int, ...],
    of: Mapping[int, Mapping[int, Call]],
    dumps: Mapping[int, Dump],
    asked: Collection[int],
) -> _Group:
    last = {rank: max(calls) for rank, calls in of.items()}
    without = tuple(rank for rank in ranks if rank not in of)
    for rank in without:
        dump = dumps.get(rank)
        if dump is None:
            known = 0 if rank in asked else None
        else:
            # A rank that has not made the group yet has called nothing in it, unless its old
            # entries were dropped. A rank without any entry is a member if the others say so.
            known = dump.reached.get(name, 0 if dump.is_empty else None)
        if known is not None:
            last[rank] = known
    return _Group(name, of, last, without)


def _mismatch_of(group: _Group) -> CollectiveFinding | None:
    of = group.of
    if len(of) < 2:
        return None
    first = max(min(calls) for calls in of.values())
    end = min(group.last[rank] for rank in of)
    # Only recorded numbers count: there may be gaps between them.
    for number in sorted({number for calls in of.values() for number in calls}):
        if not first <= number <= end:
            continue
        calls = {rank: of[rank][number] for rank in of if number in of[rank]}
        if len({_form(call) for call in calls.values()}) > 1:
            return _mismatch(calls)
    return None


def _behind_of(groups: Sequence[_Group], dumps: Mapping[int, Dump]) -> CollectiveFinding | None:
    """Return the ranks that have not entered the collective in which others wait.

    A rank that itself waits for another rank, in any group, is not the cause.
    """
    waits = [(group, call) for group in groups for call in group.waits()]
    behind = {rank for group, call in waits for rank in group.missing(call.number)}
    waiting = {
        rank for group, call in waits for rank in group.of if call.number in group.pending(rank)
    }
    if not behind:
        return None
    ranks = behind - waiting
    silent = ranks - dumps.keys()
    if ranks - silent:
        ranks -= silent
    elif len(silent) >= max(2, len(dumps)):  # too many to mean anything: they had no time to answer
        return None
    by_peers = {rank for rank in ranks if rank in dumps and dumps[rank].waits_for_peer}
    ranks = (ranks - by_peers) or ranks
    waits.sort(key=lambda one: -len(ranks & one[0].missing(one[1].number)))
    lines, left = [], set(ranks or behind)  # empty if they wait for each other
    for group, call in waits:
        if here := left & group.missing(call.number):
            lines.append(_behind(tuple(sorted(here)), call, group.of, silent))
            left -= here
    awaited, name = tuple(sorted(behind)), waits[0][1].name
    return CollectiveFinding("hang", tuple(sorted(ranks)), "; ".join(lines), name, awaited)


def _states_of(group: _Group) -> Iterator[CollectiveFinding]:
    """Yield what is wrong in a group whose ranks have all reached the same number."""
    calls = {rank: of[group.last[rank]] for rank, of in group.of.items()}
    some = next(iter(calls.values()))
    if group.without or len(calls) < 2:
        unknown = tuple(rank for rank in group.without if rank not in group.last)
        if unknown and all(call.state != "completed" for call in calls.values()):
            wait = f"{_names(tuple(calls))} {_wait(calls)} in {_numbered(some)}"
            text = f"{wait}; of {_names(unknown)} there is no record here"
            yield CollectiveFinding("hang", (), text, some.name, unknown)
        return
    late = tuple(rank for rank, call in calls.items() if call.state == "scheduled")
    if late and any(call.state == "started" for call in calls.values()):
        call = calls[late[0]]
        text = f"{_names(late)} {_has(late)} not begun {_numbered(call)}"
        yield CollectiveFinding("hang", late, f"{text}: the GPU is at something before it")
    elif all(call.state != "completed" for call in calls.values()):
        text = f"all ranks have entered {_numbered(calls[min(calls)])}, and none has left it"
        yield CollectiveFinding("hang", (), text)


def _form(call: Call) -> tuple[str, str]:
    return call.name, call.sizes if call.name in _SIZED else ""


def _mismatch(calls: Mapping[int, Call]) -> CollectiveFinding:
    forms = [_form(call) for call in calls.values()]
    fewest = min(forms, key=forms.count)
    odd = tuple(rank for rank, call in calls.items() if _form(call) == fewest)
    even = len(odd) * 2 == len(forms)
    others = [call for call in calls.values() if _form(call) != fewest]
    shown = [*[calls[odd[0]]], *others[:1]]
    ranks = [odd[0], next(rank for rank, call in calls.items() if call is others[0])]
    texts = [
        f"rank {rank} calls {_described(call)}" for rank, call in zip(ranks, shown, strict=True)
    ]
    line = f"number {others[0].number} of group {others[0].group}: {'; '.join(texts)}"
    return CollectiveFinding("collective-mismatch", () if even else odd, line)


def _described(call: Call) -> str:
    sizes = f" of {call.sizes}" if call.name in _SIZED else ""
    return f"{call.name}{sizes}" + (f" at {call.place}" if call.place else "")


def _behind(
    behind: tuple[int, ...],
    waits: Call,
    of: Mapping[int, Mapping[int, Call]],
    silent: Collection[int],
) -> str:
    there = tuple(rank for rank in of if waits.number in of[rank])
    at = f" at {waits.place}" if waits.place else ""
    has = f"{_has(behind)} {'recorded nothing of' if set(behind) <= set(silent) else 'not entered'}"
    text = f"{_names(behind)} {has} {_numbered(waits)}"
    return f"{text}, in which {_names(there)} {_wait(there)}{at}"


def _wait(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _numbered(call: Call) -> str:
    return f"{call.name} number {call.number} of group {call.group}"


def _has(ranks: tuple[int, ...]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _names(ranks: tuple[int, ...], most: int = 4) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more}"


def cause(finding: CollectiveFinding) -> Hang:
    """Return a finding as the hang that ends an attempt."""
    rank = finding.ranks[0] if finding.ranks else None
    return Hang(finding.kind, rank, finding.line)
