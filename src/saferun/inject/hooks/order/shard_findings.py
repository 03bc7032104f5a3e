"""Pure: which ranks read the same data although nothing says that they should.

A false alarm costs more than a missed one: ranks in special groups (tensor, pipeline or context
parallel) may share their data, and so may all ranks if the batches identify nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

Place = tuple[int, ...]  # a rank's coordinates in a mesh
Mesh = dict[int, tuple[Place, tuple[bool, ...]]]  # rank -> place; dimensions that split data

ALL_LOOK = 16  # ranks; in a larger job each rank compares with a logarithmic number of others
_PARTS = (("num_replicas", "rank"), ("num_processes", "process_index"))  # as in samplers
_DATA = ("dp", "data", "fsdp", "shard", "replicate", "batch")  # in names of such dimensions


def part(samplers: Iterable[object]) -> str:
    """Return the part of the data that samplers claim ("1/2"); "" for all of it, or unknown."""
    for sampler in samplers:
        for size, place in _PARTS:
            count, number = getattr(sampler, size, None), getattr(sampler, place, None)
            if isinstance(count, int) and isinstance(number, int) and count > 1:
                return f"{number}/{count}"
    return ""


def encode(part: str, prints: Sequence[str | None]) -> str:
    """Return what a rank publishes: its batches' fingerprints; "" if they identify nothing.

    Equal batches, as in repeated training on one batch, identify nothing either.

    Args:
        part: the result of `part`. Ranks that take different parts are not alike: their equal
            batches come from the data, for example if one prompt goes to several ranks.
        prints: the batches' fingerprints; None for a batch that identifies nothing.
    """
    known = [one for one in prints if one is not None]
    tells = len(known) == len(prints) and len(set(known)) > 1
    return f"{part} {' '.join(known)}" if tells else ""


def mesh(ranks: Any, names: Sequence[str | None]) -> Mesh:
    """Return the places of a mesh's ranks.

    Args:
        ranks: nested lists, as from `DeviceMesh.mesh.tolist()`.
        names: names of the dimensions; None for one without a name. The only dimension of a mesh
            splits the data unless its name says otherwise.
    """
    alone = len(names) == 1
    splits = tuple(alone if name is None else any(p in name for p in _DATA) for name in names)
    return {rank: (place, splits) for rank, place in _places(ranks, ())}


def _places(ranks: Any, at: Place) -> Iterator[tuple[int, Place]]:
    if isinstance(ranks, list):
        for number, inner in enumerate(ranks):
            yield from _places(inner, (*at, number))
    else:
        yield ranks, at


def groups(world: Any, size: int) -> list[set[int]]:
    """Return the ranks of groups that the script made itself: not by a mesh, not of all ranks.

    Args:
        world: the object `_world` of torch.distributed.distributed_c10d.
        size: the number of all ranks.
    """
    found = []
    for group, ranks in world.pg_group_ranks.items():
        by_mesh = str(getattr(group, "group_desc", "")).startswith("mesh_")
        if not by_mesh and 1 < len(ranks) < size:
            found.append(set(ranks))
    return found


def peers(rank: int, size: int) -> list[int]:
    """Return the ranks whose batches a rank compares: all, or, of many, some at each distance."""
    if size <= ALL_LOOK:
        return list(range(size))
    return sorted({rank, *((rank + (1 << step)) % size for step in range(size.bit_length()))})


def same(
    texts: Mapping[int, str], meshes: Sequence[Mesh], groups: Sequence[Collection[int]]
) -> list[int]:
    """Return the largest set of ranks with equal batches of which no two may share them.

    It is empty if there is none.

    Args:
        texts: results of `encode`, by rank.
        meshes: all meshes that were made.
        groups: groups whose ranks may share their data.
    """
    best: list[int] = []
    for first in sorted(texts):
        alike: list[int] = []
        for other in sorted(texts):
            is_same = texts[other] == texts[first] != ""
            if is_same and not any(_may_share(one, other, meshes, groups) for one in alike):
                alike.append(other)
        if len(alike) > max(1, len(best)):
            best = alike
    return best


def _may_share(
    one: int, other: int, meshes: Sequence[Mesh], groups: Sequence[Collection[int]]
) -> bool:
    if any(one in group and other in group for group in groups):
        return True
    for found in meshes:
        if one in found and other in found:
            (mine, splits), (theirs, _) = found[one], found[other]
            apart = [split for a, b, split in zip(mine, theirs, splits) if a != b]
            if apart and not any(apart):
                return True
    return False
