"""Pure: merge a chain of profile files and the user's `--set` options into one Profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from saferun.errors import ProfileError
from saferun.knowledge.variable_names import LISTS, combine
from saferun.model import Profile, Setting
from saferun.profile.schema import Doc, Leaf, in_range
from saferun.settings import KEYS, Settings, with_values


class Conditions(NamedTuple):
    """The facts against which `when:` clauses are evaluated."""

    torch: str | None  # version text; None if it is not known
    gpus: int  # number of visible ones
    distributed: bool  # more than one rank will run
    named: bool  # the user named the profile: it was not detected
    attempts: int = 1  # number that is allowed; `resolve` determines it


class Given(NamedTuple):
    """One parsed `--set` option."""

    key: str
    leaf: Leaf
    origin: str  # "--set" or "SAFERUN_SET"


def is_for_gpus(chain: Sequence[Doc]) -> bool:
    """Return whether a profile is for GPUs: its chain has `cuda` or one that matches a GPU."""
    return any(doc.match or doc.name == "cuda" for doc in chain)


def holds(leaf: Leaf, conditions: Conditions) -> bool:
    """Return whether all conditions of a value hold; no condition on an unknown torch does."""
    return all(_holds(wanted, getattr(conditions, name)) for name, wanted in leaf.when)


def _holds(wanted: str | bool, fact: str | int | None) -> bool:
    if isinstance(wanted, bool):
        return wanted == fact
    return fact is not None and in_range(str(fact), wanted)


def resolve(
    chain: Sequence[Doc], sets: Iterable[Given], conditions: Conditions, *, origin: str
) -> Profile:
    """Merge a chain of profiles and the user's settings; a later value overrides an earlier one.

    Args:
        chain: ancestors first, the chosen profile last.
        sets: `--set` options in order; they override every file.
        conditions: the facts for the `when:` clauses.
        origin: what chose the profile, for messages.

    Raises:
        ProfileError: values exclude each other.
    """
    sets = tuple(sets)
    attempts = _settings(_merged(chain, sets, conditions)).retry.attempts
    leaves = _merged(chain, sets, conditions._replace(attempts=attempts))
    profile = Profile(
        name=chain[-1].name if chain else "none",
        torchrun=_open_section("torchrun", leaves),
        env=_open_section("env", leaves),
        settings=_settings(leaves),
        notes={k: _setting(*v) for k, v in leaves.items() if k in KEYS},
        named=conditions.named,
        origin=origin,
    )
    _refuse_pairs(profile, leaves)
    return profile


def _merged(
    chain: Sequence[Doc], sets: Sequence[Given], conditions: Conditions
) -> dict[str, tuple[Leaf, str]]:
    """Return the value of each key, and its origin."""
    leaves: dict[str, tuple[Leaf, str]] = {}
    for doc in chain:
        for key, leaf in doc.leaves.items():
            if holds(leaf, conditions):
                leaves[key] = (_over(leaves.get(key), key, leaf), doc.path)
    for given in sets:
        leaves[given.key] = (_over(leaves.get(given.key), given.key, given.leaf), given.origin)
    return leaves


def _settings(leaves: Mapping[str, tuple[Leaf, str]]) -> Settings:
    return with_values(Settings(), {key: leaf.value for key, (leaf, _) in leaves.items()})


def _over(older: tuple[Leaf, str] | None, key: str, leaf: Leaf) -> Leaf:
    """Return the later value; if the variable is a list, merged with the earlier one."""
    name = key.partition(".")[2]
    if older is None or not key.startswith("env.") or name not in LISTS:
        return leaf
    return leaf._replace(value=combine(name, str(older[0].value), str(leaf.value)))


def _setting(leaf: Leaf, origin: str) -> Setting:
    return Setting(str(leaf.value), origin, leaf.why, leaf.source)


def _open_section(name: str, leaves: Mapping[str, tuple[Leaf, str]]) -> dict[str, Setting]:
    start = name + "."
    return {k[len(start) :]: _setting(*v) for k, v in leaves.items() if k.startswith(start)}


def _refuse_pairs(profile: Profile, leaves: Mapping[str, tuple[Leaf, str]]) -> None:
    """Refuse values that exclude each other; the error names the origin of each."""

    def where(*keys: str) -> str:
        return "; ".join(f"`{k}` from {leaves[k][1]}" for k in keys if k in leaves)

    hooks, retry = profile.settings.hooks, profile.settings.retry
    markers, graphs = hooks.cudagraph_markers, hooks.compile.cudagraphs
    loose = {"off": ("keep", "off-when-distributed"), "off-when-distributed": ("keep",)}
    if graphs in loose.get(markers, ()) and hooks.compile.enabled != "off":
        raise ProfileError(
            f"CUDA-graph markers `{markers}` with CUDA graphs `{graphs}`",
            where=where("hooks.cudagraph_markers", "hooks.compile.cudagraphs"),
            fix="with graphs on, the markers keep their outputs apart: "
            f"set hooks.compile.cudagraphs to {markers} too, or markers to keep",
        )
    if retry.attempts > retry.attempts_total:
        raise ProfileError(
            "retry.attempts is larger than retry.attempts_total",
            where=where("retry.attempts", "retry.attempts_total"),
            fix="raise retry.attempts_total",
        )
    if profile.settings.workers > 1 and profile.settings.launcher == "torchrun":
        raise ProfileError(
            "workers is for `launcher: python`",
            where=where("workers"),
            fix="under torchrun the count is torchrun.nproc-per-node",
        )
