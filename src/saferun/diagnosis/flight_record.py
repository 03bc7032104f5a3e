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
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeGuard

from saferun.diagnosis.evidence import Hang

_SIZED = {"all_reduce", "broadcast", "reduce", "allreduce_coalesced"}  # alike on all ranks
# The limit for characters, frames, tensors and their sizes. Where something large stands again and
# again, a pickle stays small, and as a text it has no end.
_MOST = 1000
_LIBRARY = ("/site-packages/", "/dist-packages/", "/saferun/inject/", "/hooks/inject/")


class Call(NamedTuple):
    """One collective, as one rank recorded it."""

    group: str
    number: int  # the collective's in its group, from 1 on
    name: str  # "all_reduce"
    sizes: str  # those of its input
    state: str  # "scheduled", "started", "completed"
    place: str  # "train.py:33 in step"; "" if unknown


class Finding(NamedTuple):
    """Who is elsewhere, by the recorder."""

    kind: str  # the failure's: "hang", "collective-mismatch"
    ranks: tuple[int, ...]  # those that are behind; the smaller part of a mismatch
    line: str  # a clause for people


class _Plain(pickle.Unpickler):
    """Reads containers, text and numbers, and refuses everything else."""

    def find_class(self, module: str, name: str, /) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")

    def persistent_load(self, pid: object, /) -> object:
        raise pickle.UnpicklingError("a reference in a dump")


def read(content: bytes) -> list[Call] | None:
    """Return the collectives of a dump; None where it is incomplete, or something else.

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
    if not isinstance(entries, list):
        return None
    return [call for entry in entries if isinstance(entry, dict) for call in _calls(entry)]


def _calls(entry: Mapping[str, object]) -> Iterator[Call]:
    group, number = entry.get("process_group"), entry.get("collective_seq_id")
    if entry.get("is_p2p") or not _is_number(number) or not isinstance(group, (list, tuple)):
        return
    name = _text(entry.get("profiling_name")).rpartition(":")[2]
    names = [text for part in group[:_MOST] if (text := _text(part)) not in ("", "undefined")]
    names = names[-1:] if "default_pg" in names else names
    sizes, state = _sizes(entry.get("input_sizes")), _text(entry.get("state"))
    if entry.get("retired"):  # gloo's have no other mark of their end
        state = "completed"
    yield Call(":".join(names), number, name, sizes, state, _place(entry.get("frames")))


def _is_number(value: object) -> TypeGuard[int]:
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
    return str(value) if len(numbers) <= _MOST and all(map(_is_number, numbers)) else ""


def _place(frames: object) -> str:
    """Return the innermost frame of the script's own code."""
    for frame in frames[:_MOST] if isinstance(frames, list) else ():
        path = _text(frame.get("filename")) if isinstance(frame, dict) else ""
        if path.startswith("/") and not any(part in path for part in _LIBRARY):
            line = frame.get("line")
            return f"{path}:{line if _is_number(line) else '?'} in {_text(frame.get('name'))}"
    return ""


def compare(dumps: Mapping[int, list[Call]]) -> Finding | None:
    """Return who is elsewhere; None where the dumps do not tell.

    Args:
        dumps: rank -> its collectives, in their order.
    """
    groups: dict[str, dict[int, dict[int, Call]]] = {}
    for rank, calls in sorted(dumps.items()):
        for call in calls:
            groups.setdefault(call.group, {}).setdefault(rank, {})[call.number] = call
    found = [finding for of in groups.values() if len(of) > 1 for finding in _of_group(of)]
    # A mismatch is the cause of the rest, and who is behind tells more than that all wait.
    return min(found, key=lambda one: (one.kind, not one.ranks), default=None)


def _of_group(of: Mapping[int, Mapping[int, Call]]) -> Iterator[Finding]:
    """Yield what is wrong in a group, of which each rank has called something."""
    last = {rank: max(calls) for rank, calls in of.items()}
    first, end = max(min(calls) for calls in of.values()), min(last.values())
    # The numbers that there are: nothing says that they have no gaps.
    for number in sorted({number for calls in of.values() for number in calls}):
        if not first <= number <= end:
            continue
        calls = {rank: of[rank][number] for rank in of if number in of[rank]}
        if len({_form(call) for call in calls.values()}) > 1:
            yield _mismatch(calls)
            return
    behind = tuple(rank for rank in of if last[rank] < max(last.values()))
    if behind:
        later = [call for calls in of.values() for call in calls.values()]
        waits = min((c for c in later if c.number > last[behind[0]]), key=lambda c: c.number)
        if waits.state != "completed":
            yield Finding("hang", behind, _behind(behind, waits, of))
        return
    calls = {rank: of[rank][last[rank]] for rank in of}
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


def _behind(behind: tuple[int, ...], waits: Call, of: Mapping[int, Mapping[int, Call]]) -> str:
    there = tuple(rank for rank in of if waits.number in of[rank])
    at = f" at {waits.place}" if waits.place else ""
    text = f"{_names(behind)} {_has(behind)} not entered {_numbered(waits)}"
    return f"{text}, in which {_names(there)} {'waits' if len(there) == 1 else 'wait'}{at}"


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
