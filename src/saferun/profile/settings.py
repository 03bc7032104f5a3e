"""Pure: the values of a profile's keys as one typed `Settings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from saferun.model import (
    CompileHook,
    GuardsHook,
    HookSettings,
    InitHook,
    LockPolicy,
    MemoryHook,
    MitigationPolicy,
    NotifyPolicy,
    OptunaHook,
    OrderHook,
    PreflightPolicy,
    RecoverPolicy,
    ResumePolicy,
    RetryPolicy,
    Settings,
    TensorflowHook,
    WatchPolicy,
)
from saferun.profile.schema import KEYS, Value

T = TypeVar("T")

# The type of each group of keys; its fields are the keys of the group.
TYPES: dict[str, Callable[..., Any]] = {
    "hooks": HookSettings,
    "hooks.compile": CompileHook,
    "hooks.init": InitHook,
    "hooks.order": OrderHook,
    "hooks.guards": GuardsHook,
    "hooks.memory": MemoryHook,
    "hooks.optuna": OptunaHook,
    "hooks.tensorflow": TensorflowHook,
    "retry": RetryPolicy,
    "retry.resume": ResumePolicy,
    "mitigate": MitigationPolicy,
    "preflight": PreflightPolicy,
    "locks": LockPolicy,
    "watch": WatchPolicy,
    "notify": NotifyPolicy,
    "recover": RecoverPolicy,
}


def build(values: Mapping[str, Value]) -> Settings:
    """Return the settings from values by dotted key; a key without a value has its default."""
    return _group(Settings, "", values)


def _group(kind: Callable[..., T], prefix: str, values: Mapping[str, Value]) -> T:
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]  # a NamedTuple's
    return kind(*(_field(f"{prefix}{name}", values) for name in fields))


def _field(key: str, values: Mapping[str, Value]) -> object:
    if key in TYPES:
        return _group(TYPES[key], f"{key}.", values)
    return values[key] if key in values else KEYS[key].default


def replace(hooks: HookSettings, changes: Mapping[str, Mapping[str, Value]]) -> HookSettings:
    """Return hook settings with some values changed.

    Args:
        hooks: the settings.
        changes: hook -> key -> value: {"compile": {"autotune": "off"}}. Keys are not checked here
            but when the mitigations are read (planning/mitigation_catalog.py).
    """
    parts = {name: getattr(hooks, name)._replace(**part) for name, part in changes.items()}
    return hooks._replace(**parts)
