"""A chain of profiles, `--set`s and facts make one Profile."""

import pytest

from saferun.errors import ProfileError
from saferun.profile.merge import Conditions, Given, resolve
from saferun.profile.schema import Doc, Leaf, in_range

HERE = Conditions(torch="2.9.0+cu130", gpus=2, distributed=True, named=True)


def doc(name: str, /, *, match: tuple[str, ...] = (), **leaves) -> Doc:
    found = {k.replace("__", "."): v for k, v in leaves.items()}
    as_leaf = {k: v if isinstance(v, Leaf) else Leaf(v) for k, v in found.items()}
    return Doc(f"{name}.yaml", name, "", (), match, as_leaf)


def merged(*docs: Doc, sets=(), at=HERE):
    return resolve(docs, sets, at, origin="--profile")


def test_a_later_profile_wins_and_says_where_a_value_comes_from():
    conf = "env__PYTORCH_CUDA_ALLOC_CONF"
    first = doc("a", env__X="1", env__Y="1", **{conf: "x:1,y:1"})
    profile = merged(first, doc("b", env__X="2", **{conf: "y:2"}))
    assert {n: (s.value, s.origin) for n, s in profile.env.items()} == {
        "X": ("2", "b.yaml"),
        "Y": ("1", "a.yaml"),
        "PYTORCH_CUDA_ALLOC_CONF": ("x:1,y:2", "b.yaml"),
    }
    assert profile.name == "b"


def test_set_beats_every_file():
    sets = [Given("retry.attempts", Leaf(1), "--set"), Given("env.X", Leaf("3"), "--set")]
    profile = merged(doc("a", retry__attempts=5, env__X="1"), sets=sets)
    assert profile.settings.retry.attempts == 1
    assert profile.env["X"].origin == "--set"


@pytest.mark.parametrize(
    ("when", "at", "holds"),
    [
        ((("torch", ">=2.8,<2.10"),), HERE, True),
        ((("torch", ">=2.8"),), HERE._replace(torch=None), False),
        ((("gpus", ">1"),), HERE, True),
        ((("gpus", "1"),), HERE._replace(gpus=1), True),
        ((("distributed", False),), HERE, False),
        ((("named", True),), HERE._replace(named=False), False),
        ((("named", False),), HERE._replace(named=False, distributed=True), True),
        ((("attempts", ">1"),), HERE, True),
        ((("torch", ">=2.8"), ("gpus", ">4")), HERE, False),
    ],
)
def test_an_entry_counts_only_where_its_conditions_hold(when, at, holds):
    profile = merged(doc("a", env__X="old"), doc("b", env__X=Leaf("new", when=when)), at=at)
    assert profile.env["X"].value == ("new" if holds else "old")


@pytest.mark.parametrize("by", ["profile", "--set"])
def test_a_condition_on_the_attempts_sees_those_that_are_allowed_in_the_end(by):
    leaf = Leaf("warm", when=(("attempts", ">1"),))
    docs, sets = [doc("a", start__ranks=leaf)], []
    if by == "profile":
        docs.append(doc("b", retry__attempts=1))
    else:
        sets = [Given("retry.attempts", Leaf(1), "--retries")]
    assert merged(*docs[:1]).settings.start.ranks == "warm"
    assert merged(*docs, sets=sets).settings.start.ranks == "spawn"


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("2.9.0a0+git12", ">=2.9", True),
        ("2.10.1", ">=2.8,<2.10", False),
        ("2.9", "==2.9.0", True),
        ("2.9.1", "!=2.9.1", False),
        ("2.13.0.dev20260101", "<=2.13", True),
        ("unknown", ">=1", False),
    ],
)
def test_versions_compare_by_release_number(version, wanted, inside):
    assert in_range(version, wanted) is inside


@pytest.mark.parametrize(
    ("markers", "graphs", "enabled", "fine"),
    [
        ("keep", "keep", "keep", True),
        ("off", "off-when-distributed", "keep", False),
        ("off", "off", "keep", True),
        ("off", "keep", "off", True),
        ("off-when-distributed", "keep", "keep", False),
        ("off-when-distributed", "off-when-distributed", "keep", True),
    ],
)
def test_markers_off_with_graphs_on_is_refused_as_a_pair(markers, graphs, enabled, fine):
    leaves = {
        "hooks.cudagraph_markers": Leaf(markers),
        "hooks.compile.cudagraphs": Leaf(graphs),
        "hooks.compile.enabled": Leaf(enabled),
    }
    it = Doc("a.yaml", "a", "", (), (), leaves)
    if fine:
        merged(it)
        return
    with pytest.raises(ProfileError, match=r"`hooks\.cudagraph_markers` from a\.yaml") as caught:
        merged(it)
    assert "hooks.compile.cudagraphs" in str(caught.value)
