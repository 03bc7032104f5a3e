"""Pure: what ranks disagree on, and how that is said. Every rank judges the same facts alike."""

from __future__ import annotations

NAMES = {
    "world_size": "world size",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "gpu": "GPU",
    "mitigations": "mitigations",
    "barrier": "init barrier",
}


def judge(facts):
    """Return what is to be said about the ranks' facts: {"differences", "arguments", "speakers"}.

    `speakers` is the lowest rank of each node: who says on stderr what all raise.
    """
    first = {}
    for rank in sorted(facts):
        first.setdefault(facts[rank].get("node"), rank)
    return {
        "differences": differences(facts),
        "arguments": argument_difference(facts),
        "speakers": sorted(first.values()),
    }


def differences(facts):
    """Return one clause for each thing that ranks disagree on, in a fixed order."""
    clauses = []
    for key, name in NAMES.items():
        groups = _grouped({rank: fact.get(key) for rank, fact in facts.items()})
        if len(groups) > 1:
            value, odd = groups[0]
            parts = ["%s %s %s %s" % (ranks_text(odd), has(odd), name, value)]
            parts += ["%s %s %s" % (ranks_text(r), has(r), v) for v, r in reversed(groups[1:])]
            clauses.append(", ".join(parts))
    return clauses


def argument_difference(facts):
    """Return one line about ranks that were started with other arguments, or ""."""
    words = _without_ranks(facts)
    groups = _grouped({rank: _frozen(words.get(rank)) for rank in facts})
    if len(groups) < 2:
        return ""
    (words, odd), (usual, others) = groups[0], groups[-1]
    pairs = zip((*words, "nothing more"), (*usual, "nothing more"))
    mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    text = "%s %s started with other arguments than %s: %s against %s"
    return text % (ranks_text(odd), was(odd), ranks_text(others), mine[:80], theirs[:80])


def _without_ranks(facts):
    """Return each rank's arguments; a word that differs by the rank's own number becomes "#"."""
    import re

    words = {rank: fact["argv"] for rank, fact in facts.items() if fact.get("argv") is not None}
    if len({len(argv) for argv in words.values()}) != 1:
        return words
    columns = []
    for column in zip(*words.values()):
        for numbers in (list(words), [facts[rank].get("local", "") for rank in words]):
            marked = {
                re.sub(r"(?<!\d)%s(?!\d)" % number, "#", word) if str(number) else word
                for number, word in zip(numbers, column)
            }
            if len(marked) == 1 and len(set(column)) > 1:
                column = tuple(marked) * len(words)
        columns.append(column)
    rows = zip(*columns) if columns else [()] * len(words)
    return dict(zip(words, (list(row) for row in rows)))


def ranks_text(ranks):
    """Return "rank 3", "ranks 1, 3" or "ranks 0-2, 5"."""
    runs = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def _grouped(values):
    """Return [(value, ranks)], rarest first; unknown values (None) are left out."""
    groups = {}
    for rank in sorted(values):
        if values[rank] is not None:
            groups.setdefault(values[rank], []).append(rank)
    return sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))


def _frozen(words):
    return None if words is None else tuple(words)


def has(ranks):
    return "has" if len(ranks) == 1 else "have"


def was(ranks):
    return "was" if len(ranks) == 1 else "were"
