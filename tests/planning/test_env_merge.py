"""Who decides an environment variable, and how lists are put together."""

import pytest

from saferun.model import Setting
from saferun.planning.env_merge import merge


def profile(**values: str) -> dict[str, Setting]:
    return {name: Setting(value, "profiles/p.yaml") for name, value in values.items()}


def command(**values: str) -> dict[str, Setting]:
    return {name: Setting(value, "--set") for name, value in values.items()}


def values(merged) -> dict[str, str]:
    return {name: setting.value for name, setting in merged.env.items()}


@pytest.mark.parametrize(
    ("given", "exported", "made", "kept"),
    [
        (profile(A="1", B="2"), {"A": "9"}, {"B": "2"}, {"A"}),
        (command(A="1"), {"A": "9"}, {"A": "1"}, set()),
        (profile(A="1"), {"A": "1"}, {}, set()),
        (profile(A="1"), {"A": ""}, {}, {"A"}),
        (profile(PYTHONPATH="/p"), {"PYTHONPATH": "/a::/b"}, {"PYTHONPATH": "/a::/b:/p"}, set()),
        (
            command(PYTORCH_CUDA_ALLOC_CONF="a:1"),
            {"PYTORCH_CUDA_ALLOC_CONF": "a:2,b:3"},
            {"PYTORCH_CUDA_ALLOC_CONF": "b:3,a:1"},
            set(),
        ),
        (
            command(CUDA_VISIBLE_DEVICES="1"),
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            {"CUDA_VISIBLE_DEVICES": "1"},
            set(),
        ),
    ],
)
def test_set_wins_over_what_is_exported_and_that_over_a_profile(given, exported, made, kept):
    merged = merge(given, exported)
    assert values(merged) == made
    assert merged.kept.keys() == kept


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


def test_a_list_exported_under_its_other_name_is_merged_into_both():
    """Which name torch reads first has changed: either way both hold the user's and ours."""
    merged = merge(profile(PYTORCH_CUDA_ALLOC_CONF="a:1"), {"PYTORCH_ALLOC_CONF": "b:2"})
    assert values(merged) == {"PYTORCH_ALLOC_CONF": "b:2,a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2,a:1"}


@pytest.mark.parametrize(
    ("visible", "left"), [("0,1", True), (" 2 , 3", True), ("GPU-1234", False), ("", False)]
)
def test_device_order_is_left_alone_where_indices_are_exported(visible, left):
    env = profile(CUDA_DEVICE_ORDER="PCI_BUS_ID")
    made = values(merge(env, {"CUDA_VISIBLE_DEVICES": visible}))
    assert made == ({} if left else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


def test_exported_visible_devices_are_never_widened_not_even_by_set():
    merged = merge(command(CUDA_VISIBLE_DEVICES="0,1,2,3"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert values(merged) == {}
    assert "CUDA_VISIBLE_DEVICES=0,1 is exported" in merged.remarks[0]
