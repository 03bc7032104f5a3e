"""The state of a sampler's random numbers: kept, put back, and advanced by a trial.

A sampler of Optuna's holds its random numbers in `numpy.random.RandomState`s (one or two, inside
`LazyRandomState`); all else that it needs it reads from the study. So these states are all that a
new process needs to go on as the one before would have. One of the user's own is searched likewise.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

_DEPTH = 5  # of objects in the sampler that are searched
# A point of theirs is taken once a trial has it, whatever became of that trial: a killed trial of
# theirs is put back into the queue with what it has. The others sample it again.
_REMEMBERING = ("GridSampler", "BruteForceSampler", "QMCSampler", "CmaEsSampler")


def generators(sampler: object) -> dict[str, Any]:
    """Return a sampler's generators by the path of attributes that leads to each.

    One that has not drawn yet and has no seed is not there: nothing of it can be repeated.
    """
    return dict(_search(sampler, "", set(), _DEPTH))


def states(found: Mapping[str, Any]) -> dict[str, object]:
    """Return the states of these generators, as JSON has them (0.1 ms for two)."""
    kept: dict[str, object] = {}
    for path, generator in found.items():
        if hasattr(generator, "get_state"):
            kept[path] = _legacy(generator)
        else:
            kept[path] = dict(generator.bit_generator.state)
    return kept


def restore(sampler: object, kept: Mapping[str, Any]) -> None:
    """Put states back into a sampler that was made in the same way."""
    for path, generator in generators(sampler).items():
        state = kept.get(path)
        if not isinstance(state, dict):
            continue
        if hasattr(generator, "set_state"):
            _restore_legacy(generator, state)
        else:
            generator.bit_generator.state = state


def remembers(sampler: object) -> bool:
    """Tell whether a sampler leaves out what a failed trial had."""
    inner = getattr(sampler, "_base_sampler", sampler)  # PartialFixedSampler
    return any(kind.__name__ in _REMEMBERING for kind in type(inner).__mro__)


def advance(study: Any, trials: list[Any], trial: Any) -> None:
    """Have a study's sampler draw for a trial that is there already, in a study of its own.

    Args:
        study: whose sampler it is.
        trials: all trials of the study.
        trial: the one of them.
    """
    import copy

    import optuna

    drawing = copy.deepcopy(study.sampler)  # one that has seen a study refuses another one
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        other = optuna.create_study(
            directions=study.directions, sampler=drawing, pruner=study.pruner
        )
        other.add_trials([one for one in trials if one.number < trial.number])
        fixed = trial.system_attrs.get("fixed_params")
        if fixed is not None:
            other.enqueue_trial(fixed)
        other.ask(fixed_distributions=trial.distributions)
        restore(study.sampler, states(generators(drawing)))
    finally:
        optuna.logging.set_verbosity(before)


def _search(holder: object, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    import numpy

    if id(holder) in seen or not depth:
        return
    seen.add(id(holder))
    for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
        if isinstance(value, (numpy.random.RandomState, numpy.random.Generator)):
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{path}{name}", value
        elif not isinstance(value, type) and _is_searched(value, holder):
            yield from _search(value, f"{path}{name}.", seen, depth - 1)


def _is_searched(value: object, holder: object) -> bool:
    module = type(value).__module__
    return module.startswith("optuna") or module == type(holder).__module__


def _legacy(generator: Any) -> dict[str, object]:
    import base64

    name, keys, place, has_gauss, gauss = generator.get_state()
    text = base64.b64encode(keys.tobytes()).decode()
    return {"name": name, "keys": text, "place": place, "has_gauss": has_gauss, "gauss": gauss}


def _restore_legacy(generator: Any, state: Mapping[str, Any]) -> None:
    import base64

    import numpy

    keys = numpy.frombuffer(base64.b64decode(state["keys"]), dtype=numpy.uint32)
    generator.set_state((state["name"], keys, state["place"], state["has_gauss"], state["gauss"]))
