"""Pure: the settings of a generated script, read from the fields that it passes on.

A script of `gen-shell` contains its profile as shell commands, one for each setting. At run time it
passes on four fields for each setting:

    its origin, its conditions, the key, the value as text

profile/values.py reads the values. This needs no YAML parser, which the script's machine may lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from saferun.errors import ProfileError
from saferun.profile.merge import Given
from saferun.profile.schema import WHEN_FLAGS, WHEN_WORDS, Doc, Leaf, is_range
from saferun.profile.values import read_value

PROFILE, CHOSEN, MADE_FOR = "profile", "chosen", "made-for"  # keys that are not settings
SLURM = "slurm."  # what keys begin with that only a script for Slurm has
ARGUMENT = "slurm.argument"
DETECTED = "detected"
SET = "--set"  # origin of a setting that overrides the user's exports
_CONDITION = rf"({'|'.join(WHEN_WORDS)})\s*(.+)\Z"


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """The settings of one script, before anything is known about its machine."""

    profile: str
    chosen: str  # what chose the profile: "--profile", "./saferun.yaml", "detected"
    made_for: tuple[str, ...]  # fragments of GPU product names; empty: any machine
    chain: tuple[Doc, ...]
    sets: tuple[Given, ...] = ()
    slurm: Mapping[str, str] = field(default_factory=dict)  # of a script for Slurm (slurm_job.py)
    arguments: tuple[str, ...] = ()  # the own ones of a script for Slurm

    @property
    def named(self) -> bool:
        """Return whether the user named the profile; others never change torchrun's arguments."""
        return self.chosen != DETECTED


# --- all settings of a script ------------------------------------------------------------------


def conditions(leaf: Leaf) -> tuple[str, ...]:
    """Return the conditions of a setting, each without blanks: "torch>=2.8,<2.10"."""
    found = []
    for name, wanted in leaf.when:
        text = "".join(str(wanted).lower().split())
        found.append(f"{name}={text}" if text[:1] not in "<>=!" else f"{name}{text}")
    return tuple(found)


def read(fields: Sequence[str], script: str) -> ScriptSettings:
    """Return the settings that a script passed on.

    Args:
        fields: four fields for each setting.
        script: the script's name, for messages.

    Raises:
        ProfileError: a user has edited a setting so that it is not valid.
    """
    facts: dict[str, list[str]] = {PROFILE: [], CHOSEN: [], MADE_FOR: [], ARGUMENT: []}
    docs: list[tuple[str, dict[str, Leaf]]] = []
    sets: list[Given] = []
    slurm: dict[str, str] = {}
    for at in range(0, len(fields) - 3, 4):
        origin, when, key, text = fields[at : at + 4]
        if key in facts:
            facts[key].append(text)
        elif key.startswith(SLURM):
            slurm[key.removeprefix(SLURM)] = text
        elif origin == SET:
            sets.append(Given(key, read_value(key, text, script), SET))
        else:
            leaf = read_value(key, text, script)._replace(when=tuple(_when(when.split(), script)))
            _add(docs, origin, key, leaf)
    profile = (facts[PROFILE] or ["none"])[-1]
    chosen = (facts[CHOSEN] or [script])[-1]
    made_for = tuple(facts[MADE_FOR])
    return ScriptSettings(
        profile,
        chosen,
        made_for,
        tuple(_chain(docs, profile, made_for)),
        tuple(sets),
        slurm,
        tuple(facts[ARGUMENT]),
    )


def _add(docs: list[tuple[str, dict[str, Leaf]]], origin: str, key: str, leaf: Leaf) -> None:
    """Add a setting to those of its file; a repeated one starts another document.

    Each of them then applies if its own condition holds.
    """
    if not docs or docs[-1][0] != origin or key in docs[-1][1]:
        docs.append((origin, {}))
    docs[-1][1][key] = leaf


def _chain(
    docs: Iterable[tuple[str, Mapping[str, Leaf]]], profile: str, made_for: tuple[str, ...]
) -> list[Doc]:
    chain = [Doc(path, _stem(path), "", (), (), leaves) for path, leaves in docs]
    return [*chain, Doc(profile, profile, "", (), made_for, {})]


def _stem(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[0]


def _when(conditions: Iterable[str], script: str) -> Iterable[tuple[str, str | bool]]:
    for condition in conditions:
        match = re.match(_CONDITION, condition)
        name, wanted = match.groups() if match else (condition, "")
        if name in WHEN_FLAGS and wanted in ("=true", "=false"):
            yield name, wanted == "=true"
        elif is_range(name, wanted := re.sub("^=(?!=)", "", wanted)):
            yield name, wanted
        else:
            fix = f"known: {', '.join(WHEN_WORDS)}, such as torch>=2.8"
            raise ProfileError(f"`{condition}` is not a condition", where=script, fix=fix)
