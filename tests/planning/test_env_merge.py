"""Who decides an environment variable, and how lists are put together."""

from __future__ import annotations

import pytest

from saferun.knowledge.variable_names import combine
from saferun.model import Setting
from saferun.planning.env_merge import merge


def profile(**values: str) -> dict[str, Setting]:
    return {name: Setting(value, "profiles/p.yaml") for name, value in values.items()}


def command(**values: str) -> dict[str, Setting]:
    return {name: Setting(value, "--set") for name, value in values.items()}


def values(merged) -> dict[str, str]:
    return {name: setting.value for name, setting in merged.env.items()}


def test_an_exported_variable_wins_over_the_profile_and_that_is_kept_to_be_said():
    merged = merge(profile(A="1", B="2"), {"A": "9"})
    assert values(merged) == {"B": "2"}
    assert merged.kept["A"].value == "1"


def test_set_wins_over_exported():
    assert values(merge(command(A="1"), {"A": "9"})) == {"A": "1"}


def test_the_same_value_is_neither_set_nor_said():
    merged = merge(profile(A="1"), {"A": "1"})
    assert (merged.env, merged.kept) == ({}, {})


def test_an_exported_empty_value_counts_as_exported():
    assert values(merge(profile(A="1"), {"A": ""})) == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "result"),
    [
        pytest.param("a:1", "b:2", "b:2,a:1", id="added"),
        pytest.param("a:1,c:3", "a:2", "a:2,c:3", id="the exported key wins"),
        pytest.param("a:1", "a:2", None, id="nothing to add"),
        pytest.param("a:1", "", "a:1", id="exported empty"),
    ],
)
def test_allocator_settings_are_merged_key_by_key(ours, theirs, result):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    merged = merge(profile(**{name: ours}), {name: theirs})
    assert merged.env[name].value == result if result else name not in merged.env
    if result:
        assert merged.env[name].origin == "exported + profiles/p.yaml"


def test_set_wins_key_by_key_in_a_list():
    name = "PYTORCH_CUDA_ALLOC_CONF"
    merged = merge(command(**{name: "a:1"}), {name: "a:2,b:3"})
    assert values(merged) == {name: "b:3,a:1"}


def test_a_list_exported_under_its_other_name_is_merged_into_both():
    """Which name torch reads first has changed: either way both hold the user's and ours."""
    merged = merge(profile(PYTORCH_CUDA_ALLOC_CONF="a:1"), {"PYTORCH_ALLOC_CONF": "b:2"})
    assert values(merged) == {
        "PYTORCH_ALLOC_CONF": "b:2,a:1",
        "PYTORCH_CUDA_ALLOC_CONF": "b:2,a:1",
    }


def test_an_empty_item_in_a_path_survives():
    merged = merge(profile(PYTHONPATH="/p"), {"PYTHONPATH": "/a::/b"})
    assert values(merged) == {"PYTHONPATH": "/a::/b:/p"}


@pytest.mark.parametrize("visible", ["0", "0,1", " 2 , 3"])
def test_device_order_is_left_alone_where_indices_are_exported(visible):
    env = profile(CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert values(merge(env, {"CUDA_VISIBLE_DEVICES": visible})) == {}


@pytest.mark.parametrize("visible", ["GPU-1234", "", "MIG-12"])
def test_device_order_is_set_where_no_index_is_exported(visible):
    env = profile(CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert values(merge(env, {"CUDA_VISIBLE_DEVICES": visible})) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID"
    }


def test_exported_visible_devices_are_never_widened_not_even_by_set():
    merged = merge(command(CUDA_VISIBLE_DEVICES="0,1,2,3"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert values(merged) == {}
    assert "CUDA_VISIBLE_DEVICES=0,1 is exported" in merged.remarks[0]


def test_exported_visible_devices_can_be_narrowed_by_set():
    merged = merge(command(CUDA_VISIBLE_DEVICES="1"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert values(merged) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_later_profile_puts_its_items_over_an_earlier_ones():
    assert combine("PYTORCH_CUDA_ALLOC_CONF", "a:1,b:2", "b:3,c:4") == "a:1,b:3,c:4"
