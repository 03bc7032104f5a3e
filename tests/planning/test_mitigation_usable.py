"""Whether a mitigation can help here, and the reason where it cannot."""

import pytest
from mitigation_plans import ALL, here

from saferun.planning import mitigation_catalog, mitigation_overlay
from saferun.profile.schema import Leaf


@pytest.mark.parametrize(
    ("name", "past", "usable"),
    [
        ("autotune-off", "torch._inductor.runtime.triton_heuristics", False),
        ("compile-off", "torch._inductor.runtime.triton_heuristics", True),
        ("compile-off", "torch", False),
        ("ddp-optimizer-off", "torch._dynamo.convert_frame", False),
        ("expandable-segments", "torch", True),
    ],
)
def test_a_mitigation_whose_hook_the_job_bypasses_is_not_tried_again(name, past, usable):
    situation = here()._replace(missed=frozenset({past}))
    assert (mitigation_overlay.refusal(ALL, name, (), situation) == "") is usable


GRAPHS = {"graphs_seen": True}


@pytest.mark.parametrize(
    ("name", "in_force", "at", "why"),
    [
        ("no-such", (), here(), "no such mitigation"),
        ("nvls-off", ("nvls-off",), here(), "in force already"),
        ("debug-settings", (), here(), "only collects diagnostics"),
        ("expandable-segments", (), here(**GRAPHS), "CUDA graphs"),
        ("expandable-segments", (), here(environ={"TORCHINDUCTOR_CUDAGRAPHS": "1"}), "CUDA graphs"),
        ("split-size", ("expandable-segments",), here(), "together with expandable-segments"),
        ("autotune-off", (), here(hooks_run=False), "skip the hooks"),
        ("newer-ptxas", (), here(answers={}), "no value for: newest-ptxas"),
        ("free-port", (), here(leaves={"launcher": Leaf("python")}), "no torchrun"),
        ("free-port", (), here("--nnodes=2", "t.py"), "one node cannot"),
        ("nccl-p2p-off", (), here(environ={"NCCL_P2P_DISABLE": "1"}), "change nothing"),
        ("nvls-off", (), here(leaves={"env.NCCL_NVLS_ENABLE": Leaf("0")}), "change nothing"),
        ("autotune-off", (), here(leaves={"hooks.compile.autotune": Leaf("off")}), "nothing"),
        ("free-port", ("fresh-rendezvous",), here(), "change nothing"),
    ],
)
def test_a_mitigation_that_cannot_help_here_is_refused_with_the_reason(name, in_force, at, why):
    assert why in mitigation_overlay.refusal(ALL, name, in_force, at)


@pytest.mark.parametrize(
    ("in_force", "leaves"),
    [
        (("cudagraphs-off",), {}),
        (("compile-off",), {}),
        ((), {"hooks.compile.cudagraphs": Leaf("off")}),
        ((), {"hooks.compile.enabled": Leaf("off")}),
    ],
    ids=["mitigation", "not compiled", "profile", "profile without compilation"],
)
def test_expandable_segments_may_be_used_once_graphs_are_off(in_force, leaves):
    at = here(leaves=leaves, **GRAPHS)
    assert mitigation_overlay.refusal(ALL, "expandable-segments", in_force, at) == ""


@pytest.mark.parametrize(
    ("torch", "fits"), [("2.7.1", False), ("2.8.0+cu128", True), ("2.10.0", False), (None, False)]
)
def test_a_mitigation_for_some_versions_is_for_those_only_and_for_no_unknown_one(torch, fits):
    body = {"cost": "c", "why": "w", "source": "s", "env": {"A": "1"}, "torch": ">=2.8,<2.10"}
    made = mitigation_catalog.parse({"a": body})
    assert (mitigation_overlay.refusal(made, "a", (), here(torch=torch)) == "") is fits


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({"effective": {"triton.cudagraphs": True}}, True),
        ({"graphs": True}, True),
        ({"effective": {"triton.cudagraphs": False}}, False),
        ({"effective": "?"}, False),
        ({}, False),
    ],
)
def test_receipts_tell_whether_graphs_were_used(facts, seen):
    assert mitigation_overlay.graphs_seen([{}, facts]) is seen
