"""Pure: numbers of ranks as text for people."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_MOST_RUNS = 8  # most runs of consecutive ranks that the text names


def ranks_text(ranks: Collection[int]) -> str:
    """Return "rank 3", "ranks 0-2, 5", only the first of very many; "a process …" for none."""
    if not ranks:
        return "a process without a rank"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MOST_RUNS]]
    parts += ["…"] if len(runs) > _MOST_RUNS else []
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)
