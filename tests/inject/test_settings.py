"""The settings of the hooks are those of a profile, completed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from saferun.inject import settings
from saferun.profile.schema import KEYS


def leaves(group: Mapping[str, Any], prefix: str = "hooks") -> Iterator[tuple[str, object]]:
    for name, value in group.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def test_every_setting_of_a_hook_is_a_key_of_profiles_with_the_same_default() -> None:
    found = dict(leaves(settings.DEFAULTS))
    assert found == {key: KEYS[key].default for key in found}


def test_every_key_of_a_profile_for_these_hooks_is_a_setting() -> None:
    groups = tuple(f"hooks.{name}." for name, value in settings.DEFAULTS.items() if value)
    wanted = {key for key in KEYS if key.startswith(groups)}
    assert wanted <= dict(leaves(settings.DEFAULTS)).keys()


def test_a_hook_that_patches_torch_only_on_request_is_none_where_it_is_not_named() -> None:
    found = settings.complete({})
    assert (found["init"], found["order"]) == (None, None)
    assert found["compile"] == settings.DEFAULTS["compile"]


def test_booleans_that_yaml_made_of_on_and_off_are_words_again() -> None:
    given = {"excepthook": False, "compile": {"fallback": True}, "order": {"wrap_barrier": False}}
    found = settings.complete(given)
    assert (found["excepthook"], found["compile"]["fallback"]) == ("off", "on")
    assert found["order"] == {"mode": "warn", "wrap_barrier": False}
