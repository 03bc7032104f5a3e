"""The shipped mitigations as data: what the code understands, and how one is described."""

from cases import check_cases
from mitigation_plans import ALL

from saferun.diagnosis import signatures
from saferun.planning import mitigation_catalog
from saferun.planning.mitigation_catalog import CUDAGRAPHS, FREE_PORT, FRESH_ID
from saferun.profile.schema import is_range
from saferun.settings import KEYS

PROBES = {"fresh-directory", "newest-ptxas", "reachable-interface", "=reachable-interface"}
OPTIONS = {"master-port": FREE_PORT, "rdzv-endpoint": FREE_PORT, "rdzv-id": FRESH_ID}


def test_every_mitigation_says_only_what_the_code_understands():
    """A key that no field has, or a missing cost, reason or source, is an error of `parse`."""

    def check(made: mitigation_catalog.Mitigation) -> None:
        texts = (made.cost, made.why, made.source, *made.env.values())
        assert all(isinstance(text, str) for text in texts), "quote what YAML reads otherwise"
        assert set(made.computed.values()) <= PROBES
        assert made.torchrun.items() <= OPTIONS.items()
        for key, value in made.settings.items():
            choices = (True, False) if KEYS[key].kind == "bool" else KEYS[key].choices
            assert value in choices, key
        assert made.cost_percent is None or 0 <= made.cost_percent <= 100
        assert set(made.excludes) <= {*ALL, CUDAGRAPHS}
        assert all(
            not versions or is_range("torch", versions) for versions in (made.torch, made.nccl)
        )
        assert {made.last, made.rank_directories} <= {True, False}

    check_cases([(made,) for made in ALL.values()], check)


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
