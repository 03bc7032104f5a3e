"""Pure: the environment variables that a job gets, and where each value comes from.

`--set env.X=` overrides what the user exported, which overrides a profile. Values that are lists
are merged item by item, so that a profile's allocator setting never removes one of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from saferun.knowledge.variable_names import LISTS, OTHER_NAME, combine, item_name, items
from saferun.model import Setting


class Merged(NamedTuple):
    """The variables that saferun sets, and those that it leaves as exported."""

    env: Mapping[str, Setting]
    kept: Mapping[str, Setting]  # name -> the profile's setting that was not used
    remarks: tuple[str, ...]


def merge(profile: Mapping[str, Setting], exported: Mapping[str, str]) -> Merged:
    """Return the variables that saferun sets for a job.

    Args:
        profile: the resolved `env` section; a setting whose origin is `--set` or `SAFERUN_SET`
            overrides `exported`.
        exported: the user's environment.
    """
    env: dict[str, Setting] = {}
    kept: dict[str, Setting] = {}
    remarks: list[str] = []
    for name, setting in profile.items():
        other = OTHER_NAME.get(name, "")
        theirs = exported.get(name)
        if _renumbers(name, exported, setting):
            kept[name] = setting
            if _commanded(setting):
                remarks.append(_renumbering(name, setting, exported))
        elif theirs is None and other in exported:
            _merge_list(other, exported[other], setting, env, kept)
            env[name] = env.get(other, setting._replace(value=exported[other], origin="exported"))
        elif theirs is None or (_commanded(setting) and name not in LISTS):
            env[name] = setting
        elif name in LISTS:
            _merge_list(name, theirs, setting, env, kept)
        elif theirs != setting.value:
            kept[name] = setting
    return Merged(env, kept, tuple(remarks))


def _commanded(setting: Setting) -> bool:
    """Return whether the user set it by `--set` or SAFERUN_SET."""
    return setting.origin in ("--set", "SAFERUN_SET")


def _renumbers(name: str, exported: Mapping[str, str], setting: Setting) -> bool:
    """Return whether a setting would change which GPUs the numbers in CUDA_VISIBLE_DEVICES mean."""
    visible = exported.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return False
    if name == "CUDA_DEVICE_ORDER":
        return exported.get(name) != setting.value and any(
            item.strip().isdigit() for item in visible.split(",")
        )
    if name == "CUDA_VISIBLE_DEVICES":
        return not set(items(setting.value, ",")) <= set(items(visible, ","))
    return False


def _renumbering(name: str, setting: Setting, exported: Mapping[str, str]) -> str:
    visible = exported["CUDA_VISIBLE_DEVICES"]
    return (
        f"{name}={setting.value} ({setting.origin}) left out: CUDA_VISIBLE_DEVICES={visible} is "
        "exported and would name other GPUs; export both yourself to change that"
    )


def _merge_list(
    name: str, theirs: str, setting: Setting, env: dict[str, Setting], kept: dict[str, Setting]
) -> None:
    """Merge a setting's items with the exported ones, into `env` or `kept`.

    Where both have an item of the same name, `--set` wins over the exported one, and the exported
    one wins over a profile.

    Args:
        name: the variable's name, a key of LISTS.
        theirs: the exported value.
        setting: the setting of the profile or of `--set`.
        env: receives the merged value if it differs from `theirs`.
        kept: receives the profile's setting if none of its items was used.
    """
    between, _ = LISTS[name]
    ours, old = items(setting.value, between), items(theirs, between)
    if _commanded(setting):
        value = combine(name, theirs, setting.value)
    else:  # the exported text is kept unchanged: an empty item can have a meaning
        taken = {item_name(name, item) for item in old}
        added = [item for item in ours if item_name(name, item) not in taken]
        value = between.join([theirs, *added] if theirs else added)
    if value != theirs:
        env[name] = setting._replace(value=value, origin=f"exported + {setting.origin}")
    elif not set(ours) <= set(old):
        kept[name] = setting
