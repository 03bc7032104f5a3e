"""Reseed a sampler if another process of this run has already made its first draws.

A sampler of Optuna holds its random numbers in `numpy.random.RandomState`s, inside
`LazyRandomState`; it reads all other state from the study. A user's own sampler may hold a
`numpy.random.Generator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEPTH = 5  # levels of objects in the sampler that are searched
_SEEDS = 2**31


def reseed(sampler: object, trials: int) -> None:
    """Reseed each seeded generator of a sampler from its own seed and a number of trials.

    A generator without a seed does not exist before its first draw, and draws differently in each
    process.

    Args:
        sampler: the sampler that the script made.
        trials: number of the study's trials so far.
    """
    for generator in list(_generators(sampler, set(), _DEPTH)):
        if hasattr(generator, "set_state"):
            generator.seed([int(generator.randint(_SEEDS)), trials])
        else:
            seed = [int(generator.integers(_SEEDS)), trials]
            generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _generators(holder: object, seen: set[int], depth: int) -> Iterator[Any]:
    import numpy

    if id(holder) in seen or not depth:
        return
    seen.add(id(holder))
    for value in list(getattr(holder, "__dict__", {}).values()):
        if isinstance(value, (numpy.random.RandomState, numpy.random.Generator)):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif not isinstance(value, type) and _is_searched(value, holder):
            yield from _generators(value, seen, depth - 1)


def _is_searched(value: object, holder: object) -> bool:
    module = type(value).__module__
    return module.startswith("optuna") or module == type(holder).__module__
