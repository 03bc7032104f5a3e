"""The shipped mitigations as data: what is refused, what a hook must do, how one is described."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cases import check_cases
from mitigation_plans import ALL, SITE

from saferun.diagnosis import signatures
from saferun.errors import SaferunError
from saferun.inject.targets import TARGETS
from saferun.planning import mitigation_catalog


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"envv": {}}, "unknown key `envv`"),
        ({"env": {"A": 1}}, "A is not text"),
        ({"env": ["A"]}, "`env` is not a mapping"),
        ({"hooks": {"compile": {"autotun": "off"}}}, "unknown setting hooks.compile.autotun"),
        ({"hooks": {"compile": {"autotune": "no"}}}, "hooks.compile.autotune cannot be 'no'"),
        ({"computed": {"A": "a-guess"}}, "there is no probe `a-guess`"),
        ({"torchrun": {"master-port": "fresh"}}, "--master-port cannot be `fresh`"),
        ({"process": {"nofiles": 3}}, "unknown key `nofiles`"),
        ({"excludes": ["b"]}, "excludes `b`, which is not a mitigation"),
        ({"torch": "2.8 and up"}, "is not a range"),
        ({"cost_percent": "30"}, "cost_percent is not a number"),
        ({"cost": ""}, "has no `cost`"),
    ],
)
def test_a_mitigation_that_the_code_would_not_understand_is_refused(body, message):
    with pytest.raises(SaferunError, match=message):
        mitigation_catalog.parse({"a": {"cost": "none", "why": "w", "source": "https://s", **body}})


def test_no_nearest_word_is_looked_for_where_every_word_is_known(monkeypatch):
    """A decision after a failure waits for it: 145 words took 20 ms."""
    monkeypatch.setitem(sys.modules, "difflib", None)  # an import would fail
    assert mitigation_catalog.load() == ALL


def test_no_mitigation_promises_a_hook_that_does_not_exist():
    hooks = {hook for named in TARGETS.values() for hook in named}
    assert {hook for mitigation in ALL.values() for hook in mitigation.hooks} <= hooks


def test_the_hook_acts_on_the_mitigations_that_only_it_can_make():
    files = ("compile/mitigations.py", "tensorflow/hook.py", "tensorflow/watch.py")
    text = "".join((Path(SITE).parent / "hooks" / name).read_text() for name in files)
    for mitigation in ALL.values():
        if mitigation.assign or mitigation.rank_directories:
            assert f'"{mitigation.name}"' in text
    assert ALL["ddp-optimizer-off"].assign == {"torch._dynamo.config.optimize_ddp": False}


def test_cheaper_mitigations_of_a_kind_are_tried_first_where_both_costs_were_measured():
    for kind in signatures.load().kinds.values():
        costs = [ALL[name].cost_percent for name in kind.mitigations]
        measured = [cost for cost in costs if cost is not None]
        assert measured == sorted(measured), kind.name


def test_every_mitigation_of_a_kind_can_follow_the_ones_before_it():
    """`excludes` must not end an escalation, but for the two that do the same."""
    blocked = [
        (kind.name, name)
        for kind in signatures.load().kinds.values()
        for at, name in enumerate(kind.mitigations)
        if set(ALL[name].excludes) & set(kind.mitigations[:at])
    ]
    assert {name for _, name in blocked} <= {"split-size"}


def test_a_mitigation_is_described_with_what_it_sets_and_costs():
    def check(name: str) -> None:
        text = mitigation_catalog.describe(ALL, [name])
        assert text.startswith(f"{name} (")
        assert "; cost: " in text
        assert "()" not in text
        assert "\n" not in text

    check_cases([(name,) for name in ALL], check)


def test_a_measured_cost_is_described_as_a_share_of_the_throughput():
    described = "compile-off (compile.enabled=off; cost: 32 % of the throughput)"
    assert mitigation_catalog.describe(ALL, ["compile-off"]) == described
