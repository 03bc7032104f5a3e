"""What the hooks of a plain script do: real torch on the CPU, started by the script itself."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from cases import slow
from compile_ways import ALL_WAYS, COMPILED, COUNT, EAGER, KEYS, PROBE, WAYS
from releases import needs_torch
from repo import source
from scripts import Machine, Ran

TOOLS = Path(sys.executable).parent


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.program("python3", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (machine.bin / "torchrun").unlink()  # torch's own
    return machine


def run(machine: Machine, code: str, *argv: str, ranks: int = 1, **environ: str) -> Ran:
    """Run a program as ranks under a plain script that `argv` are the settings of."""
    (machine.cwd / "program.py").write_text(code, encoding="utf-8")
    line = ("--standalone", f"--nproc-per-node={ranks}", "program.py")
    line = ("program.py",) if "hpo" in argv else line
    made = machine.script("--plain", "--profile", *argv, "--set=retry.attempts=1", "--", *line)
    path = f"{machine.bin}:{TOOLS}:/usr/bin:/bin"
    inductor = str(machine.folder / "inductor")
    return machine.run(
        *(["bash", made],),
        PATH=path,
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=inductor,
        **environ,
    )


def test_autotune_and_graphs_are_off_in_forward_and_backward_however_asked_for(machine):
    code = f"{PROBE}config.force_disable_caches = True\n{ALL_WAYS}"
    ran = run(machine, code, "h100-nanochat")
    held = json.loads(ran.out.splitlines()[-1])
    found = {way: [{key: graph[key] for key in KEYS} for graph in held[way]] for way in WAYS}
    off = dict.fromkeys(KEYS, False)
    assert found == {way: [off] * (1 + (way != "inductor's own compile")) for way in WAYS}
    backward = {way: [graph["backward"] for graph in graphs] for way, graphs in held.items()}
    assert backward == {way: [False, True][: len(graphs)] for way, graphs in found.items()}


@pytest.mark.slow
def test_under_another_profile_the_same_program_does_autotune(machine):
    code = f"{PROBE}config.force_disable_caches = True\n{ALL_WAYS}"
    held = json.loads(run(machine, code, "cuda").out.splitlines()[-1])
    assert all(graph["max_autotune"] for graphs in held.values() for graph in graphs)


@pytest.mark.slow
@pytest.mark.parametrize(("custom", "left"), [("False", "len"), ("True", "min")])
def test_no_kernel_is_timed_but_the_scripts_own(machine, custom, left):
    ran = run(machine, source("inject/time_launchers"), "h100-nanochat", CUSTOM=custom)
    assert ran.out == f"['{left}']\n", ran.err


@pytest.mark.parametrize(("profile", "compiles"), [("h100-llava", False), *slow(("cuda", True))])
def test_with_compilation_off_nothing_is_compiled_however_asked_for(machine, profile, compiles):
    ran = run(machine, EAGER + COUNT, profile)
    assert ran.out.splitlines() == [f"{way} = {compiles}" for way in COMPILED], ran.err


@pytest.mark.slow
def test_the_cudagraphs_backend_is_held_too(machine):
    code = """
import torch
from torch._dynamo.utils import counters
out = torch.compile(lambda x: x.sin() + 1, backend="cudagraphs")(torch.ones(3))
print(torch.equal(out, torch.ones(3).sin() + 1), counters["inductor"]["cudagraph_skips"])
"""
    assert run(machine, code, "h100-nanochat").out == "True 0\n"


@pytest.mark.parametrize(
    ("profile", "ranks", "steps"), [("ddp-safe", 2, 0), *slow(("ddp-safe", 1, 4), ("cuda", 2, 4))]
)
def test_markers_count_no_step_in_a_distributed_job(machine, profile, ranks, steps):
    ran = run(machine, source("inject/mark_steps"), profile, ranks=ranks, GROUP="made")
    # Between them torch 2.8 writes lines of gloo's, in pieces.
    assert re.findall(r"steps=(\d+);", ran.out) == [str(steps)] * ranks, ran.err


GRAPHS = "torch.compile(body, options={'triton.cudagraphs': True})(x).backward(dx)\nshow(lowered)"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "graphs"), [(1, True), (2, False)])
def test_graphs_go_off_when_distributed_and_only_then(machine, ranks, graphs):
    ran = run(machine, PROBE + GRAPHS, "ddp-safe", ranks=ranks)
    found = [json.loads(line) for line in ran.out.replace("][", "]\n[").splitlines()]
    assert {graph["triton.cudagraphs"] for one in found for graph in one} == {graphs}, ran.err


LATE = """
import os, time, torch.distributed as dist
if os.environ["RANK"] == "1":
    time.sleep(600)  # until torchrun ends it
dist.init_process_group("gloo")
"""


def test_a_rank_that_does_not_come_is_named_after_a_time(machine):
    ran = run(machine, LATE, "cuda", "--set=hooks.init.timeout_s=1", ranks=2)
    assert ran.status == 1
    assert "ranks [1] of 2 did not reach init_process_group in 0:00:01" in ran.err


@needs_torch("2.8", "TORCH_GLOO_LAZY_INIT")
def test_ranks_wait_for_each_other_until_the_last_has_made_its_group(machine):
    """A lazy gloo's init waits for nobody of itself."""
    late = source("inject/late_for_init").replace("+ 30", "+ 3")  # it comes, as nobody can go ahead
    ran = run(machine, late, "cuda", ranks=2, TORCH_GLOO_LAZY_INIT="1")
    met = sorted(re.findall(r"2\.0 (?:True|False)", ran.out))  # among lines of gloo's
    assert (ran.status, met) == (0, ["2.0 False", "2.0 True"]), ran.err


LOADERS = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.arange(8.0))
early = DataLoader(data{sampler})
dist.init_process_group("gloo")
late = DataLoader(data)
print(len(list(early)), flush=True)
"""


@pytest.mark.parametrize(
    ("sampler", "said"),
    [("", 1), *slow((", sampler=DistributedSampler(data, num_replicas=2, rank=0)", 0))],
)
def test_a_loader_made_before_the_group_is_said_once(machine, sampler, said):
    ran = run(machine, LOADERS.format(sampler=sampler), "cuda", ranks=2)
    assert ran.status == 0, ran.err
    assert ran.err.count("a DataLoader of TensorDataset was made before init_process") == said


GUARDED = """
import torch, torch.nn.functional as F
from torch import nn
logits, table = torch.randn(4, 3, requires_grad=True), nn.Embedding(5, 2)
def tries(call):
    try:
        print("passed", call().shape)
    except Exception as error:
        print(type(error).__name__, error)
tries(lambda: F.cross_entropy(logits, torch.tensor([0, 1, 3, -100])))
tries(lambda: nn.NLLLoss()(logits, torch.tensor([0, 1, 2, -9])))
tries(lambda: F.cross_entropy(logits, torch.tensor([0, 1])))
tries(lambda: nn.CrossEntropyLoss()(logits, torch.tensor([0, 1, 2, -100])))
tries(lambda: F.cross_entropy(logits, torch.rand(4, 3)))
tries(lambda: table(torch.tensor([4, -1])))
tries(lambda: table(torch.tensor([0, 4])))
tries(lambda: nn.EmbeddingBag(5, 2)(torch.tensor([[0, 5]])))
compiled = torch.compile(F.cross_entropy, backend="eager", fullgraph=True)
tries(lambda: compiled(logits, torch.tensor([0, 1, 2, 0])))
"""
FOUND = """\
IndexError labels out of range: 3; there are 3: 0 to 2
IndexError labels out of range: -9; there are 3: 0 to 2
ValueError logits of shape (4, 3) go with labels of shape (4,), not (2,)
passed torch.Size([])
passed torch.Size([])
IndexError indices out of range: -1; there are 5: 0 to 4
passed torch.Size([2, 2])
IndexError indices out of range: 5; there are 5: 0 to 4
passed torch.Size([])
"""


def test_labels_and_indices_out_of_range_are_errors_with_their_values(machine):
    ran = run(machine, GUARDED, "debug")
    assert ran.out == FOUND, ran.err
    assert "hook:" not in ran.err


STUDY = """
import optuna, torch
calls = []
torch.cuda.empty_cache = lambda: calls.append(1)
optuna.logging.set_verbosity(optuna.logging.ERROR)
optuna.create_study().optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
print(len(calls))
"""


@pytest.mark.slow
def test_the_cache_is_emptied_twice_after_each_trial(machine):
    pytest.importorskip("optuna")
    ran = run(machine, STUDY, "hpo")
    assert ran.out == "4\n", ran.err


# --- at the start of a Python --------------------------------------------------------------------


def test_a_sitecustomize_of_the_users_is_loaded_and_paths_are_as_without_ours(machine):
    (machine.folder / "own").mkdir()
    (machine.folder / "own" / "sitecustomize.py").write_text("print('mine')", encoding="utf-8")
    ran = run(
        *(machine, "import sys; print([p for p in sys.path if '/tmp.' in p])", "h100-llava"),
        PYTHONPATH=str(machine.folder / "own"),
    )
    assert sorted(ran.out.split()) == ["[]", "mine", "mine"]  # torchrun's own Python has it, too
    assert "Error" not in ran.err


def test_a_fault_of_a_hook_is_one_line_and_the_job_goes_on(machine):
    fake = machine.folder / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("", encoding="utf-8")  # has no `compile`
    code = f"import sys; sys.path.insert(0, {os.fspath(fake.parent)!r}); import torch; print('on')"
    ran = run(machine, code, "h100-llava")
    assert (ran.status, ran.out) == (0, "on\n"), ran.err
    (line,) = ran.err.splitlines()
    assert line.startswith("hook: AttributeError: ")
