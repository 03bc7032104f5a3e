"""Rows of cells as text. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, its cells below those of the others.

    Args:
        rows: of the same length.
        right: the columns whose cells are flush right.
    """
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        size = max(map(len, cells))
        columns.append([c.rjust(size) if index in right else c.ljust(size) for c in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
