"""What an environment setting does: knowledge/variable_effects.yaml as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from saferun.errors import SaferunError
from saferun.knowledge import loader


class Remark(NamedTuple):
    """What is wrong with a value."""

    level: str  # "problem" or "note"
    what: str
    fix: str


class Effect(NamedTuple):
    """What is known of one variable; the head of variable_effects.yaml says what the fields are."""

    does: str = ""
    cost: str = ""
    overridden: str = ""
    modes: tuple[str, ...] = ()
    config: str = ""
    function: str = ""
    idle: Mapping[str, str] = {}
    warn: Mapping[str, Remark] = {}
    newer: str = ""
    dead: str = ""
    fix: str = ""
    until: str = ""
    names: str = ""
    quiet: bool = False
    reader: str = ""
    source: str = ""


UNKNOWN = Effect()


def load() -> Mapping[str, Effect]:
    """Return what each variable of variable_effects.yaml does, by name.

    Raises:
        SaferunError: settings.yaml has an unknown key.
    """
    document = loader.load("variable_effects.yaml")
    settings: Mapping[str, Mapping[str, Any]] = document["settings"]
    return {name: _effect(name, body) for name, body in settings.items()}


def _effect(name: str, body: Mapping[str, Any]) -> Effect:
    if unknown := body.keys() - set(Effect._fields):
        where = f"knowledge/variable_effects.yaml, {name}"
        raise SaferunError(f"unknown key `{min(unknown)}`", where=where)
    warn = {value: Remark(*row) for value, row in body.get("warn", {}).items()}
    return Effect(**{**body, "warn": warn, "modes": tuple(body.get("modes", ()))})
