"""Pure: what the dumps of torch's flight recorder say of a hang: who is behind in which collective.

torch keeps the last collectives of each rank, with the place in the script from which each was
called (torch/csrc/distributed/c10d/FlightRecorder.hpp, torch 2.4 to 2.15), and dumps them as a
pickle of plain containers, in some ways as JSON. A pickle may call anything, so ours is read with
nothing to call.
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

from saferun.diagnosis.evidence import Hang

_SIZED = {"all_reduce", "broadcast", "reduce", "allreduce_coalesced"}  # alike on all ranks
# The limit for characters, frames, tensors and their sizes. Where something large stands again and
# again, a pickle stays small, and as a text it has no end.
_MOST = 1000
_LIBRARY = ("/site-packages/", "/dist-packages/", "/saferun/inject/", "/hooks/inject/")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as one rank recorded it."""

    group: str
    number: int  # the collective's in its group, from 1 on
    name: str  # "all_reduce"
    sizes: str  # those of its input
    state: str  # "scheduled", "started", "completed"
    place: str  # "train.py:33 in step"; "" if unknown


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank has recorded."""

    calls: list[Call]
    # Groups that it is in: their ranks, and the last number that it has called, as far as the dump
    # tells. Of what was forgotten only the number is left; 0 where nothing was called.
    members: Mapping[str, tuple[int, ...]]
    reached: Mapping[str, int]
    is_empty: bool = False  # it has no entry, as that of a rank that something holds from all else
    waits_for_peer: bool = False  # a send or recv of it has not ended


@dataclass(frozen=True, slots=True)
class Finding:
    """Who is elsewhere, by the recorder."""

    kind: str  # the failure's: "hang", "collective-mismatch"
    ranks: tuple[int, ...]  # those that are behind; the smaller part of a mismatch
    line: str  # a clause for people
    call: str = ""  # the collective in which the others wait
    awaited: tuple[int, ...] = ()  # who has not entered a collective of theirs, as far as is known
    gone: tuple[int, ...] = ()  # those whose process is dead or gives no answer


@dataclass(frozen=True, slots=True)
class _Group:
    """What one group's ranks have recorded. Several may have one name: that of a mesh's rows."""

    name: str
    of: Mapping[int, Mapping[int, Call]]  # rank -> its calls by number, at least one
    last: Mapping[int, int]  # the number of the last call of each rank of which it is known
    without: tuple[int, ...]  # the other ranks that it has by `pg_config`

    def pending(self, rank: int) -> list[int]:
        return [number for number, call in self.of[rank].items() if call.state != "completed"]

    def missing(self, number: int) -> set[int]:
        return {rank for rank, last in self.last.items() if last < number}

    def waits(self) -> list[Call]:
        """Return the calls that some rank has not entered and others wait in, by number."""
        found = {number: self.of[rank][number] for rank in self.of for number in self.pending(rank)}
        return [call for number, call in sorted(found.items()) if self.missing(number)]


class _Plain(pickle.Unpickler):
    """Reads containers, text and numbers, and refuses everything else."""

    def find_class(self, module: str, name: str, /) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")

    def persistent_load(self, pid: object, /) -> object:
        raise pickle.UnpicklingError("a reference in a dump")


def load(content: bytes) -> tuple[dict[str, object], list[dict[str, object]]] | None:
    """Return a dump, and its entries; None where it is incomplete, or something else.

    Args:
        content: of the file; nothing in it is trusted.
    """
    try:
        dump: object = (
            json.loads(content) if content[:1] == b"{" else _Plain(io.BytesIO(content)).load()
        )
    except Exception:  # a broken pickle raises what it likes
        return None
    entries = dump.get("entries", []) if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not isinstance(dump, dict):
        return None
    return dump, [entry for entry in entries if isinstance(entry, dict)]


def read(content: bytes) -> Dump | None:
    """Return what a dump says of collectives and groups; None where it is no whole dump.

    Args:
        content: of the file; nothing in it is trusted.
    """
    if (loaded := load(content)) is None:
        return None
    dump, entries = loaded
    members = _members(dump.get("pg_config"))
    is_whole = not entries or entries[0].get("record_id") == 0  # nothing was forgotten
    reached = _reached(dump.get("pg_status"), members, is_whole=is_whole)
    calls = [call for entry in entries for call in _calls(entry)]
    waits = any(_is_pending_peer(entry) for entry in entries)
    return Dump(calls, dict(members.values()), reached, not entries, waits)


def _members(config: object) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the ranks of each group that a dump names: name -> the group as Call has it, ranks."""
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
    """Return the number of the last collective that was called in each group, where that is known.

    torch names the groups of `pg_status` by numbers, which are names of `pg_config` as well.
    """
    found = {group: 0 for group, _ in members.values()} if is_whole else {}
    for name, (group, _) in members.items():
        one = status.get(name) if isinstance(status, dict) else None
        last = one.get("last_enqueued_collective") if isinstance(one, dict) else None
        if is_number(last):
            found[group] = last
    return found


def _group(names: Iterable[object]) -> str:
    """Return the name of a group."""
    texts = [text for part in names if (text := _text(part)) not in ("", "undefined")]
    return ":".join(texts[-1:] if "default_pg" in texts else texts)


def _calls(entry: Mapping[str, object]) -> Iterator[Call]:
    group, number = entry.get("process_group"), entry.get("collective_seq_id")
    if entry.get("is_p2p") or not is_number(number) or not isinstance(group, (list, tuple)):
        return
    name = _text(entry.get("profiling_name")).rpartition(":")[2]
    sizes, state = _sizes(entry.get("input_sizes")), _text(entry.get("state"))
    if entry.get("retired"):  # gloo's have no other mark of their end
        state = "completed"
    yield Call(_group(group[:_MOST]), number, name, sizes, state, _place(entry.get("frames")))


def _is_pending_peer(entry: Mapping[str, object]) -> bool:
    is_open = entry.get("state") != "completed" and not entry.get("retired")
    return bool(entry.get("is_p2p")) and is_open


def is_number(value: object) -> TypeGuard[int]:
    """Return whether a value of a dump is a count or a time that can be right."""
    return type(value) is int and 0 <= value < 1 << 63


def _text(value: object) -> str:
    return value[:_MOST] if isinstance(value, str) else ""


def _sizes(value: object) -> str:
    """Return the sizes of tensors as Python shows them, "" for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) > _MOST:
        return ""
    if not all(isinstance(sizes, (list, tuple)) for sizes in value):
        return ""
    numbers = list(itertools.islice(itertools.chain(*value), _MOST + 1))
    return str(value) if len(numbers) <= _MOST and all(map(is_number, numbers)) else ""


def _place(frames: object) -> str:
    """Return the innermost frame of the script's own code."""
    for frame in frames[:_MOST] if isinstance(frames, list) else ():
        path = _text(frame.get("filename")) if isinstance(frame, dict) else ""
        if path.startswith("/") and not any(part in path for part in _LIBRARY):
            line = frame.get("line")
            return f"{path}:{line if is_number(line) else '?'} in {_text(frame.get('name'))}"
    return ""


def compare(dumps: Mapping[int, Dump], asked: Collection[int] = ()) -> Finding | None:
    """Return who is elsewhere; None where the dumps do not tell.

    Args:
        dumps: rank -> what it has recorded.
        asked: the ranks that were asked for theirs; one that gives none may be the one that is
            waited for.
    """
    groups = _groups(dumps, asked)
    for group in groups:  # a mismatch is the cause of the rest
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
            # A rank that has not made the group yet has called nothing in it, unless that was
            # forgotten; one without any entry is a member by what the others say.
            known = dump.reached.get(name, 0 if dump.is_empty else None)
        if known is not None:
            last[rank] = known
    return _Group(name, of, last, without)


def _mismatch_of(group: _Group) -> Finding | None:
    of = group.of
    if len(of) < 2:
        return None
    first = max(min(calls) for calls in of.values())
    end = min(group.last[rank] for rank in of)
    # The numbers that there are: nothing says that they have no gaps.
    for number in sorted({number for calls in of.values() for number in calls}):
        if not first <= number <= end:
            continue
        calls = {rank: of[rank][number] for rank in of if number in of[rank]}
        if len({_form(call) for call in calls.values()}) > 1:
            return _mismatch(calls)
    return None


def _behind_of(groups: Sequence[_Group], dumps: Mapping[int, Dump]) -> Finding | None:
    """Return who has not entered what others wait in.

    One that itself waits for another one, in whatever group, is no cause of it.
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
    elif len(silent) >= max(2, len(dumps)):  # too many for a sign: they had no time
        return None
    by_peers = {rank for rank in ranks if rank in dumps and dumps[rank].waits_for_peer}
    ranks = (ranks - by_peers) or ranks
    waits.sort(key=lambda one: -len(ranks & one[0].missing(one[1].number)))
    lines, left = [], set(ranks or behind)  # none of them where they wait for each other
    for group, call in waits:
        if here := left & group.missing(call.number):
            lines.append(_behind(tuple(sorted(here)), call, group.of, silent))
            left -= here
    awaited, name = tuple(sorted(behind)), waits[0][1].name
    return Finding("hang", tuple(sorted(ranks)), "; ".join(lines), name, awaited)


def _states_of(group: _Group) -> Iterator[Finding]:
    """Yield what is wrong in a group whose ranks have all come as far."""
    calls = {rank: of[group.last[rank]] for rank, of in group.of.items()}
    some = next(iter(calls.values()))
    if group.without or len(calls) < 2:
        unknown = tuple(rank for rank in group.without if rank not in group.last)
        if unknown and all(call.state != "completed" for call in calls.values()):
            wait = f"{_names(tuple(calls))} {_wait(calls)} in {_numbered(some)}"
            text = f"{wait}; of {_names(unknown)} there is no record here"
            yield Finding("hang", (), text, some.name, unknown)
        return
    late = tuple(rank for rank, call in calls.items() if call.state == "scheduled")
    if late and any(call.state == "started" for call in calls.values()):
        call = calls[late[0]]
        text = f"{_names(late)} {_has(late)} not begun {_numbered(call)}"
        yield Finding("hang", late, f"{text}: the GPU is at something before it")
    elif all(call.state != "completed" for call in calls.values()):
        text = f"all ranks have entered {_numbered(calls[min(calls)])}, and none has left it"
        yield Finding("hang", (), text)


def _form(call: Call) -> tuple[str, str]:
    return call.name, call.sizes if call.name in _SIZED else ""


def _mismatch(calls: Mapping[int, Call]) -> Finding:
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
    return Finding("collective-mismatch", () if even else odd, line)


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


def cause(finding: Finding) -> Hang:
    """Return a finding as the hang for which an attempt is ended."""
    rank = finding.ranks[0] if finding.ranks else None
    return Hang(finding.kind, rank, finding.line)
