"""Pure: the results of an attempt's ranks, one row for each rank or for equal ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from saferun.base.rank_numbers import ranks_text
from saferun.diagnosis.evidence import RankFailure
from saferun.inject import contract
from saferun.journal.receipts import Receipt
from saferun.system.printable import shortened

_EACH = 16  # up to so many ranks get a row each
_ROWS = 40
_CHARS = 400  # longest message of an exception, or error of a hook


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, or several equal ranks."""

    ranks: str  # "rank 3", "ranks 0-7"
    pids: tuple[int, ...]  # known for a rank with its own row
    finished: bool  # its script ran to its end
    error: str  # its recorded exception; "" for none
    hooks: tuple[str, ...]  # "init applied", "compile failed: …"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of an attempt's last start on this machine."""

    count: int = 0
    rows: tuple[RankRow, ...] = ()
    left_out: int = 0  # rows


def ranks(receipts: Sequence[Receipt], failures: Iterable[RankFailure]) -> Ranks:
    """Return the ranks' results; ranks with an exception come first.

    Args:
        receipts: the attempt's receipts.
        failures: exceptions that its ranks recorded.
    """
    latest = max((one.restart for one in receipts if one.rank is not None), default=0)
    by_rank: dict[int, list[Receipt]] = {}
    for one in receipts:
        if one.rank is not None and one.restart == latest:
            by_rank.setdefault(one.rank, []).append(one)
    errors = {one.rank: shortened(one.message, _CHARS) for one in failures if one.rank is not None}
    alike: dict[RankRow, set[int]] = {}
    for rank in sorted({*by_rank, *errors}):
        row = _row(by_rank.get(rank, []), errors.get(rank, ""))
        each = len({*by_rank, *errors}) <= _EACH
        row = replace(row, ranks=str(rank)) if each else replace(row, pids=())
        alike.setdefault(row, set()).add(rank)
    rows = [replace(row, ranks=ranks_text(those)) for row, those in alike.items()]
    rows.sort(key=lambda row: not row.error)
    return Ranks(len({*by_rank, *errors}), tuple(rows[:_ROWS]), max(0, len(rows) - _ROWS))


def _row(receipts: Sequence[Receipt], error: str) -> RankRow:
    started = [one for one in receipts if one.hook == contract.BOOTSTRAP]
    hooks: dict[str, str] = {}
    for one in receipts:
        if one.hook in (contract.BOOTSTRAP, contract.TARGETS):
            continue
        known = hooks.get(one.hook, "").startswith((contract.FAILED, contract.APPLIED))
        if known and one.outcome != contract.FAILED:
            continue
        hooks[one.hook] = one.outcome
        if one.outcome == contract.FAILED:
            hooks[one.hook] += f": {shortened(str(one.facts.get('error', '')), _CHARS)}"
    return RankRow(
        ranks="",
        pids=tuple(dict.fromkeys(one.pid for one in started)),
        finished=any(one.outcome == contract.FINISHED for one in started),
        error=error,
        hooks=tuple(f"{hook} {outcome}" for hook, outcome in sorted(hooks.items())),
    )
