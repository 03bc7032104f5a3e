"""Pure: the weights of a log's lines, and how the root cause was chosen among them.

This serves `saferun diagnose --explain`, for people who doubt a diagnosis or add a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from saferun.base.phrases import says
from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.deciding.classify import Reading
from saferun.diagnosis.deciding.nearest import misses
from saferun.diagnosis.diagnosis import Near
from saferun.diagnosis.signatures import Knowledge

LINE_CHARS = 160
_SHOWN = 30  # most lines shown, and most near misses


@dataclass(frozen=True, slots=True)
class Weighed:
    """One line of the log that speaks for a kind."""

    kind: str
    weight: float
    line: int  # counted from 1; 0 for an exit status or an error file
    rank: int | None
    text: str
    by: str  # how it was recognised
    why: tuple[str, ...]  # reasons for a change of its weight or kind


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step on the way to the root cause."""

    kind: str
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Account:
    """The reasons for a diagnosis of a log."""

    lines: tuple[Weighed, ...]  # heaviest first
    decision: tuple[Chosen, ...]  # the last one is the root cause
    near: tuple[Near, ...]  # signs whose phrase occurs, but which do not count


def account(reading: Reading, knowledge: Knowledge) -> Account:
    """Return the account of a reading: the weight of each line.

    Args:
        reading: the reading of the log (`classify.read`).
        knowledge: the signs of failures.
    """
    collected = reading.collected
    outlived = [
        replace(item, weight=0, why=(*item.why, "the job made steps after it"))
        for item in collected.outlived
    ]
    found = sorted([*collected.found, *outlived], key=lambda item: (-item.weight, item.position))
    return Account(
        tuple(map(_weighed, found)),
        tuple(Chosen(step.taken.kind, step.taken.number, step.why) for step in reading.steps),
        tuple(misses(collected, knowledge)),
    )


def _weighed(item: Candidate) -> Weighed:
    text = item.line.raw.strip() if item.line is not None else ""
    changed = (f"its message is that of {item.usual}",) if item.usual else ()
    return Weighed(
        kind=item.kind,
        weight=item.weight,
        line=item.number,
        rank=item.rank,
        text=text[:LINE_CHARS],
        by=_by(item),
        why=(*item.why, *changed),
    )


def _by(item: Candidate) -> str:
    named = f"exception {item.raised.name}".rstrip() if item.raised else item.by
    if item.sign is None:
        return named
    text = item.text.lower()
    phrases = (" ... ".join(needle) for needle in item.sign.says if says(needle, text))
    return f"sign: {next(phrases, named)}"


def as_document(found: Account) -> Mapping[str, object]:
    """Return an account for JSON."""
    return asdict(found)


def as_lines(found: Account) -> Iterator[str]:
    """Yield an account as lines for people."""
    yield "what weighed, the heaviest first:" if found.lines else "nothing in it weighed anything"
    for one in found.lines[:_SHOWN]:
        rank = "" if one.rank is None else f", rank {one.rank}"
        yield f"  {one.weight:>3g}  {one.kind}  {_place(one.line)}{rank}: {one.text}".rstrip(": ")
        yield f"       {'; '.join((one.by, *one.why))}"
    yield from _more(found.lines)
    if found.decision:
        yield "how it was chosen:"
    for step in found.decision:
        yield f"  {step.kind}, {_place(step.line)}: {step.why}"
    if found.near:
        yield "what nearly fits:"
    for near in found.near[:_SHOWN]:
        yield f"  {near.kind}, {_place(near.line)}: {near.against}"
    yield from _more(found.near)


def _place(line: int) -> str:
    return f"line {line}" if line else "beside the log"


def _more(rows: Sequence[object]) -> Iterator[str]:
    if len(rows) > _SHOWN:
        yield f"  … and {len(rows) - _SHOWN} more (all with --json)"
