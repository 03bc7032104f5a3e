"""The compile hook: inductor's effective values are the profile's, whatever the script says.

Every script probes inductor itself, where a graph is lowered (`GraphLowering.run`), forward and
backward. The same scripts without the hook show the opposite, so that these tests can fail.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from compile_ways import ALL_WAYS, COMPILED, COUNT, EAGER, KEYS, PROBE, WAYS
from ranks import WHEN_DISTRIBUTED, ForkServers, Job, runner
from releases import torch_before
from repo import source

Run = Callable[..., Job]

OFF = {"autotune": "off", "cudagraphs": "off"}
KEEP: dict[str, str] = {}
NOT_AT_ALL = {"enabled": "off"}


def lowered(run: Run, code: str, settings: dict[str, str], **extra: str) -> tuple[Any, Job]:
    """What the probe saw, and the job. Nothing is taken from inductor's cache."""
    job = run(PROBE + "config.force_disable_caches = True\n" + code, settings, **extra)
    assert job.code == 0, job.err
    return json.loads(job.out.splitlines()[-1]), job


@pytest.fixture
def run(forks: ForkServers, tmp_path: Path) -> Run:
    return runner(forks, tmp_path)


def test_autotune_and_graphs_are_off_in_forward_and_backward_however_asked_for(run):
    """The receipt tells the values in force, for both directions."""
    held, job = lowered(run, ALL_WAYS, OFF)
    found = {way: [{key: graph[key] for key in KEYS} for graph in held[way]] for way in WAYS}
    off = dict.fromkeys(KEYS, False)
    assert found == {way: [off] * (1 + (way != "inductor's own compile")) for way in WAYS}
    directions = {way: [graph["backward"] for graph in held[way]] for way in WAYS}
    assert directions == {way: [False, True][: len(graphs)] for way, graphs in found.items()}
    graphs = [line for line in job.hook("compile") if "graph" in line]
    assert {line["graph"] for line in graphs} == {"entry", "forward", "backward"}
    assert not any(line["effective"]["max_autotune"] for line in graphs)


@pytest.mark.slow
def test_without_the_policy_the_same_script_does_autotune(run):
    free, job = lowered(run, ALL_WAYS, KEEP)
    graphs = [graph for way in WAYS for graph in free[way]]
    assert all(graph["max_autotune"] and graph["triton.autotune_pointwise"] for graph in graphs)
    told = [line["effective"] for line in job.hook("compile") if "graph" in line]
    assert any(effective["max_autotune"] for effective in told)


@pytest.mark.slow  # the variable is where the configuration starts; "assignment" is the same later
@pytest.mark.parametrize(("settings", "value"), [(OFF, False), (KEEP, True)])
def test_the_policy_beats_the_environment(interpreters, settings, value):
    script = PROBE + "torch.compile(body)(x).backward(dx); show(lowered)"
    ran = interpreters.run(
        script,
        hooks={"compile": settings},
        TORCHINDUCTOR_MAX_AUTOTUNE="1",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
    )
    assert [graph["max_autotune"] for graph in json.loads(ran.out)] == [value, value]


# CUDA graphs when distributed

GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
GRAPHS = """
torch.compile(body, options={'triton.cudagraphs': True})(x).backward(dx)
show(lowered)
"""


@pytest.mark.parametrize(
    ("before", "extra", "graphs"),
    [
        *slow(("", {}, True)),
        (GROUP, {}, False),
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, False),
        *slow(("", {"RANK": "0", "WORLD_SIZE": "1"}, True), ("", {"WORLD_SIZE": "2"}, True)),
    ],
    ids=["alone", "in a group", "a rank of two", "a rank of one", "no rank"],
)
def test_graphs_go_off_when_distributed_and_only_then(run, before, extra, graphs):
    found, _ = lowered(run, before + GRAPHS, WHEN_DISTRIBUTED, **extra)
    assert [graph["triton.cudagraphs"] for graph in found] == [graphs, graphs]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "skips"), [(KEEP, True), (OFF, False)])
def test_the_cudagraphs_backend_is_held_too(run, setting, skips):
    script = """
import torch
from torch._dynamo.utils import counters
out = torch.compile(lambda x: x.sin() + 1, backend="cudagraphs")(torch.ones(3))
assert torch.equal(out, torch.ones(3).sin() + 1)
print(counters["inductor"]["cudagraph_skips"] > 0)  # on a CPU an attempt is a skip
"""
    ran = run(script, setting)
    assert ran.out == f"{skips}\n", ran.err


SHARDED = """
from torch.distributed.fsdp import fully_shard
class M(torch.nn.Module):
    def __init__(self): super().__init__(); self.w = torch.nn.Linear(8, 8, bias=False)
    def forward(self, x): return x @ self.w.weight
m = torch.nn.Sequential(M(), M()); config.max_autotune = True
for block in m:
    block.compile(options={"triton.cudagraphs": True}); fully_shard(block)
fully_shard(m)(x).backward(dx)
show(lowered)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch_before("2.7"), reason="fully_shard of torch 2.6 needs a GPU")
def test_the_policy_holds_for_each_block_of_a_sharded_model(run):
    found, _ = lowered(run, GROUP + SHARDED, {**WHEN_DISTRIBUTED, "autotune": "off"})
    assert {graph["backward"] for graph in found} == {False, True}
    values = {(graph["max_autotune"], graph["triton.cudagraphs"]) for graph in found}
    assert values == {(False, False)}


LEFT_ALONE = """
class M(torch.nn.Module):  # torch 2.4 exports no tensor that is a global
    def __init__(self): super().__init__(); self.w = torch.nn.Parameter(weight.detach())
    def forward(self, x): return x @ self.w
seen = []
def mine(graph, inputs):
    seen.append([str(node.target) for node in graph.graph.nodes]); return graph.forward
torch.compile(body, backend=mine)(x).backward(dx)
if hasattr(torch.compiler, "set_stance"):
    with torch.compiler.set_stance("force_eager"): torch.compile(body, mode="max-autotune")(x)
exported = [str(n.target) for n in torch.export.export(M(), (x.detach(),)).graph.nodes]
show([seen, exported, lowered])
"""


@pytest.mark.parametrize(
    ("setting", "backends"),
    [(OFF, 1), *slow((NOT_AT_ALL, 0), (KEEP, 1))],
    ids=["off", "not at all", "keep"],
)
def test_export_and_backends_of_the_scripts_own_are_left_alone(run, setting, backends):
    (seen, exported, compiled), _ = lowered(run, LEFT_ALONE, setting)
    assert len(seen) == backends
    assert any("matmul" in target for target in exported)
    assert compiled == []


# one launcher


@pytest.mark.parametrize(
    ("setting", "custom", "left"),
    [(OFF, False, 1), *slow((KEEP, False, 3)), (OFF, True, 3)],
    ids=["off", "keep", "a user's own kernel"],
)
def test_a_generated_kernel_has_one_launcher(run, setting, custom, left):
    active = "import os; from _saferun.inject.hook_runner import current; current('').activate()\n"
    ran = run(active + source("inject/make_launchers"), setting, CUSTOM=str(custom))
    assert ran.out == f"{left} {left} True\n", ran.err
    assert bool([line for line in ran.hook("compile") if "kept" in line]) is custom


@pytest.mark.parametrize(
    ("setting", "custom", "left"),
    [(OFF, False, "len"), *slow((KEEP, False, "min")), (OFF, True, "min")],
    ids=["off", "keep", "a user's own kernel"],
)
def test_a_kernel_that_was_made_before_the_hook_is_not_timed_either(run, setting, custom, left):
    ran = run(source("inject/time_launchers"), setting, CUSTOM=str(custom))
    assert ran.out == f"['{left}']\n", ran.err


# enabled


@pytest.mark.parametrize(("setting", "compiles"), [*slow((KEEP, True)), (NOT_AT_ALL, False)])
def test_with_compilation_off_nothing_is_compiled_however_asked_for(run, setting, compiles):
    ran = run(EAGER + COUNT, setting)
    assert ran.out.splitlines() == [f"{way} = {compiles}" for way in COMPILED], ran.err


SHAPE = EAGER + (
    "m = torch.compile(M()); m.train(); m(x).sum().backward()\n"
    "print(type(m).__name__, *sorted(m.state_dict()), m._orig_mod.w.weight.grad is not None)"
)
WRAPPED = "OptimizedModule _orig_mod.w.bias _orig_mod.w.weight True\n"


def test_an_uncompiled_module_has_the_shape_that_torchs_own_switch_gives_it(run):
    assert run(SHAPE, NOT_AT_ALL).out == WRAPPED


@pytest.mark.slow
def test_torchs_own_switch_gives_that_shape(interpreters):
    assert interpreters.run(SHAPE, hooks=None, TORCH_COMPILE_DISABLE="1").out == WRAPPED


def test_with_compilation_off_torchs_own_uses_still_compile(run):
    script = """
import torch
from torch._dynamo.utils import counters
from torch._higher_order_ops import cond
print(cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, [torch.ones(1)]))
print(counters["stats"]["unique_graphs"] > 0)
"""
    ran = run(script, NOT_AT_ALL)
    assert ran.out == "tensor([2.])\nTrue\n", ran.err


@pytest.mark.slow
@pytest.mark.skipif(torch_before("2.9"), reason="torch 2.8's fails on a CPU without our hooks, too")
@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_flex_attention_stays_compiled_when_asked_for(run, name):
    ran = run(source("inject/compile_flex_attention"), NOT_AT_ALL, NAME=name)
    assert ran.out == "True\n", ran.err


# fallback


@pytest.mark.parametrize(
    ("setting", "full", "works", "backward"),
    [
        pytest.param("on", True, False, False, id="fullgraph, forward"),
        *slow(
            ("on", False, True, True),
            ("on", False, True, False),
            ("off", False, False, False),
            ("off", False, False, True),
            ("on", True, False, True),
        ),
    ],
)
def test_fallback_runs_eagerly_what_fails_to_compile(run, setting, full, works, backward):
    if backward and works and torch_before("2.10"):
        pytest.skip("torch compiles a backward when it runs: too late to fall back")
    asked = {"BACKWARD": str(backward), "FULL": str(full)}
    ran = run(source("inject/failing_compiler"), {**WHEN_DISTRIBUTED, "fallback": setting}, **asked)
    assert (ran.out == "True\n") is works, ran.err
    assert "the compiler fails" in ran.err
