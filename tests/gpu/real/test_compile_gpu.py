"""The compile policy where it matters: Triton kernels on a GPU."""

import pytest
from repo import source

PROBE = source("gpu/count_benchmarks")
NET = "net = Net().cuda()\n"
TRAIN = "\ntrain(net)\n"
ASKS = {
    "max-autotune": 'net = torch.compile(net, mode="max-autotune")',
    "options": (
        'wanted = {"max_autotune": True, "triton.cudagraphs": True}\n'
        "net = torch.compile(net, options=wanted)"
    ),
    "config": (
        "import torch._inductor.config as c; c.max_autotune = True\n"
        "c.coordinate_descent_tuning = True; net = torch.compile(net)"
    ),
    "plain": "net = torch.compile(net)",
    "module": 'net.compile(mode="max-autotune")',
}
OFF = ("--set", "hooks.compile.autotune=off", "--set", "hooks.compile.cudagraphs=off")


@pytest.mark.parametrize("ask", ASKS)
def test_autotune_off_leaves_every_kernel_one_launcher(gpus, saferun, ask):
    done = saferun(PROBE + NET + ASKS[ask] + TRAIN, *OFF)
    assert done.code == 0, done.err[-3000:]
    (seen,) = done.reported
    assert seen["kernels"] > 2
    assert (seen["most_launchers"], seen["benchmarked"]) == (1, 0)
    assert (seen["algorithms"], seen["graphs"]) == (0, 0)


def test_without_the_hook_the_same_script_benchmarks_and_records_graphs(gpus, saferun):
    script = PROBE + NET + ASKS["max-autotune"] + TRAIN
    one = {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN"}  # all of them take minutes
    done = saferun(script, "--profile", "cpu", **one)
    assert done.code == 0, done.err[-3000:]
    (seen,) = done.reported
    assert seen["most_launchers"] > 1
    assert seen["benchmarked"] > 0
    assert seen["graphs"] > 0
    (plain,) = saferun(PROBE + NET + ASKS["plain"] + TRAIN, "--profile", "cpu").reported
    assert plain["benchmarked"] > 0


def test_enabled_off_compiles_nothing(gpus, saferun):
    done = saferun(PROBE + NET + ASKS["max-autotune"] + TRAIN, "--set", "hooks.compile.enabled=off")
    assert done.reported[0]["kernels"] == 0, done.err[-3000:]


def test_a_kernel_that_the_script_tunes_itself_is_kept_and_named(gpus, saferun):
    done = saferun(source("gpu/own_autotune"), "--set", "hooks.compile.autotune=off")
    assert done.code == 0, done.err[-3000:]
    assert "the same: True" in done.out
    assert [line["kept"] for line in done.receipts if "kept" in line] == ["double"]


FLEX = """
from torch.nn.attention.flex_attention import flex_attention
{how}
q, k, v = (torch.rand(1, 2, 1024, 64, device="cuda", requires_grad=True) for _ in range(3))
torch.cuda.reset_peak_memory_stats()
call(q, k, v).sum().backward()
show(peak=torch.cuda.max_memory_allocated())
"""


@pytest.mark.parametrize(
    "how",
    [
        "call = torch.compile(flex_attention)",
        "call = flex_attention",
        "call = torch.compile(lambda q, k, v: flex_attention(q, k, v))",
    ],
    ids=["compiled", "bare", "inside a compiled function"],
)
def test_enabled_off_leaves_flex_attention_compiled(gpus, saferun, how):
    done = saferun(PROBE + NET + FLEX.format(how=how), "--set", "hooks.compile.enabled=off")
    assert done.code == 0, done.err[-3000:]
    assert done.reported[0]["kernels"] > 0


ALONE = "net = Net().cuda()"
TOGETHER = """
import os, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
net = torch.nn.parallel.DistributedDataParallel(Net().cuda())
"""


def graphs(place: str) -> str:
    return PROBE + place + '\nnet = torch.compile(net, mode="reduce-overhead")' + TRAIN


def test_graphs_and_markers_are_kept_alone(gpus, saferun):
    done = saferun(graphs(ALONE), "--profile", "ddp-safe", "--nproc-per-node=1")
    assert done.code == 0, done.err[-3000:]
    assert done.reported[0]["graphs"] > 0


def test_graphs_and_markers_are_off_when_distributed(two_gpus, saferun):
    done = saferun(graphs(TOGETHER), "--profile", "ddp-safe", "--nproc-per-node=2")
    assert done.code == 0, done.err[-3000:]
    assert [reported["graphs"] for reported in done.reported] == [0, 0]
