"""Pure: which ranks read the same data though nothing says that they should.

A false alarm costs more than a missed one: ranks of a group of their own (tensor, pipeline or
context parallel) may share their data, and so may all where the batches tell nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

Place = tuple[int, ...]  # a rank's coordinates in a mesh
Mesh = dict[int, tuple[Place, tuple[bool, ...]]]  # rank -> place; dimensions that split data

ALL_LOOK = 16  # ranks; in a larger job each one looks at a number that grows with the logarithm
_PARTS = (("num_replicas", "rank"), ("num_processes", "process_index"))  # how samplers name them
_DATA = ("dp", "data", "fsdp", "shard", "replicate", "batch")  # parts of names of such dimensions


def part(samplers: Iterable[object]) -> str:
    """Return which part of the data samplers say that they take ("1/2"); "" for all, or unknown."""
    for sampler in samplers:
        for size, place in _PARTS:
            count, number = getattr(sampler, size, None), getattr(sampler, place, None)
            if isinstance(count, int) and isinstance(number, int) and count > 1:
                return f"{number}/{count}"
    return ""


def encode(part: str, prints: Sequence[str | None]) -> str:
    """Return what a rank publishes: its batches' fingerprints; "" where they tell nothing.

    Batches that are all the same, as when one is trained on again and again, tell nothing either.

    Args:
        part: of the data, as `part` returned. Ranks that take different parts are not alike: equal
            batches are in the data themselves, as where one prompt goes to several ranks.
        prints: of the batches; None for one that tells nothing.
    """
    known = [one for one in prints if one is not None]
    tells = len(known) == len(prints) and len(set(known)) > 1
    return f"{part} {' '.join(known)}" if tells else ""


def mesh(ranks: Any, names: Sequence[str | None]) -> Mesh:
    """Return the places of a mesh's ranks.

    Args:
        ranks: nested lists, as `DeviceMesh.mesh.tolist()`.
        names: of the dimensions; None for one without a name. The only dimension of a mesh splits
            the data unless its name says otherwise.
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
    """Return the ranks of groups that the script made itself, not by a mesh, and not of all ranks.

    Args:
        world: `_world` of torch.distributed.distributed_c10d.
        size: the number of all ranks.
    """
    found = []
    for group, ranks in world.pg_group_ranks.items():
        by_mesh = str(getattr(group, "group_desc", "")).startswith("mesh_")
        if not by_mesh and 1 < len(ranks) < size:
            found.append(set(ranks))
    return found


def peers(rank: int, size: int) -> list[int]:
    """Return the ranks whose batches a rank compares: all, or of many some at each distance."""
    if size <= ALL_LOOK:
        return list(range(size))
    return sorted({rank, *((rank + (1 << step)) % size for step in range(size.bit_length()))})


def same(
    texts: Mapping[int, str], meshes: Sequence[Mesh], groups: Sequence[Collection[int]]
) -> list[int]:
    """Return ranks that published the same batches and of which no two may share them.

    The largest such set; empty for none.

    Args:
        texts: by rank, as `encode` returned.
        meshes: all that were made.
        groups: whose ranks may share their data.
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
