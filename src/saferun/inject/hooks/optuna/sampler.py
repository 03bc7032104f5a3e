"""A new seed for a sampler whose earlier draws another process of this run has made.

A sampler of Optuna's holds its random numbers in `numpy.random.RandomState`s, inside
`LazyRandomState`; all else that it needs it reads from the study. One of the user's own may hold a
`numpy.random.Generator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEPTH = 5  # levels of objects in the sampler that are searched
_SEEDS = 2**31


def reseed(sampler: object, trials: int) -> None:
    """Give each seeded generator of a sampler a seed derived from its own and a number of trials.

    A generator without a seed is not there before its first draw, and draws anew in each process.

    Args:
        sampler: as the script has made it.
        trials: of the study so far.
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
