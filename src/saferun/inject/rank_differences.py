"""Pure: the facts on which ranks disagree, and the text that reports them.

Every rank that compares the same facts gets the same result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict, TypeVar

from ..base.rank_numbers import ranks_text
from . import cut

_ARGUMENT = 400  # characters shown of an argument

Value = TypeVar("Value")


class RankFacts(TypedDict, total=False):
    """The facts that a rank tells the others; unknown facts are absent."""

    world_size: int
    backend: str
    torch: str
    cuda: str
    nccl: str
    gpu: str
    mitigations: str
    start: str  # checkpoint from which the attempt resumes, and how
    host: str
    barrier: str
    argv: list[str]  # the result of `comparable_arguments`
    local: str  # the text of LOCAL_RANK


class Comparison(TypedDict):
    """The result of comparing the facts of all ranks."""

    differences: list[str]
    arguments: str


NAMES = {
    "world_size": "world size",
    "backend": "backend",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "gpu": "GPU",
    "mitigations": "mitigations",
    "start": "as its start",
    "barrier": "init barrier",
}
_RANK_OPTIONS = {
    "local_rank",
    "rank",
    "node_rank",
    "global_rank",
    "machine_rank",
    "local_process_index",
    "process_index",
    "process_id",
}
_SECRET_PARTS = ("key", "token", "secret", "password")


def compare(facts: Mapping[int, RankFacts]) -> Comparison:
    """Return what must be reported about the facts, which come by rank."""
    return {"differences": differences(facts), "arguments": argument_difference(facts)}


def is_reporter(rank: int, local_rank: int, missing: Collection[int]) -> bool:
    """Return whether a rank is the lowest one present on its node.

    That rank writes to stderr what all ranks raise. The ranks of a node have consecutive numbers.

    Args:
        rank: the rank of this process.
        local_rank: its place among the ranks of its node.
        missing: the ranks that have not come.
    """
    return set(range(rank - local_rank, rank)) <= set(missing)


def differences(facts: Mapping[int, RankFacts]) -> list[str]:
    """Return one clause for each fact on which ranks disagree, in a fixed order."""
    hosts = {rank: fact.get("host", "") for rank, fact in facts.items()}
    clauses = []
    for key, name in NAMES.items():
        groups = _grouped({rank: fact.get(key) for rank, fact in facts.items()})
        if len(groups) > 1:
            value, odd = groups[0]
            parts = [f"{_who(odd, hosts)} {_has(odd)} {name} {value}"]
            parts += [f"{_who(r, hosts)} {_has(r)} {v}" for v, r in reversed(groups[1:])]
            clauses.append(", ".join(parts))
    return clauses


def _who(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    """Return ranks in words, with their hosts if there are several."""
    several = len(set(hosts.values())) > 1
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    return f"{ranks_text(ranks)} ({where})" if several else ranks_text(ranks)


def argument_difference(facts: Mapping[int, RankFacts]) -> str:
    """Return one line about ranks that were started with different arguments, or ""."""
    argvs = _without_ranks(facts)
    groups = _grouped({rank: _frozen(argvs.get(rank)) for rank in facts})
    if len(groups) < 2:
        return ""
    (argv, odd), (usual, others) = groups[0], groups[-1]
    pairs = zip((*argv, "no argument"), (*usual, "no argument"))
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    was = "was" if len(odd) == 1 else "were"
    return (
        f"{ranks_text(odd)} {was} started with other arguments than {ranks_text(others)}: "
        f"{cut.beginning(ours, _ARGUMENT)} against {cut.beginning(theirs, _ARGUMENT)}"
    )


def comparable_arguments(argv: Sequence[str]) -> list[str]:
    """Return a script's arguments in the form that is compared.

    Arguments that give a rank its number are left out, the script is reduced to its file name
    (nodes may store it in different places), and secrets are masked.
    """
    kept = [argv[0].rpartition("/")[2]] if argv else []
    skip = secret = False
    for word in argv[1:]:
        if (skip or secret) and not word.startswith("-"):
            kept.extend(["***"] if secret else [])
            skip = secret = False
            continue
        name, equals, _ = word.partition("=")
        plain = name.lstrip("-").replace("-", "_").lower()
        is_option = word.startswith("-")
        names_rank = is_option and plain in _RANK_OPTIONS
        names_secret = is_option and any(part in plain for part in _SECRET_PARTS)
        skip, secret = names_rank and not equals, names_secret and not equals
        if not names_rank:
            kept.append(name + "=***" if names_secret and equals else word)
    return kept


def _without_ranks(facts: Mapping[int, RankFacts]) -> dict[int, list[str]]:
    """Return each rank's arguments; a word that differs only by the rank's number becomes "#"."""
    argvs = {rank: fact["argv"] for rank, fact in facts.items() if fact.get("argv") is not None}
    if len({len(argv) for argv in argvs.values()}) != 1:
        return argvs
    locals_ = [facts[rank].get("local", "") for rank in argvs]
    columns = []
    for column in zip(*argvs.values()):
        for numbers in ([str(rank) for rank in argvs], locals_):
            marked = {
                re.sub(rf"(?<!\d){number}(?!\d)", "#", word) if number else word
                for number, word in zip(numbers, column)
            }
            if len(marked) == 1 and len(set(column)) > 1:
                column = tuple(marked) * len(argvs)
        columns.append(column)
    rows = zip(*columns) if columns else [()] * len(argvs)
    return {rank: list(row) for rank, row in zip(argvs, rows)}


def _grouped(values: Mapping[int, Value | None]) -> list[tuple[Value, list[int]]]:
    """Return [(value, ranks)], the rarest first; unknown values (None) are left out."""
    groups: dict[Value, list[int]] = {}
    for rank in sorted(values):
        value = values[rank]
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))


def _frozen(argv: list[str] | None) -> tuple[str, ...] | None:
    return None if argv is None else tuple(argv)


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
