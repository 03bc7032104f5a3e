"""The start of a process group on NCCL."""

from ranks import line_of
from repo import source

DEVICE = source("gpu/sum_on_devices")


def test_each_rank_has_its_own_device_before_nccl_starts(two_gpus, saferun):
    done = saferun(DEVICE, "--nproc-per-node=2")
    assert done.code == 0, done.err[-3000:]
    assert sorted((t["rank"], t["device"], t["sum"]) for t in done.reported) == [
        (0, 0, 2),
        (1, 1, 2),
    ]
    init = [r for r in done.receipts if r["hook"] == "init" and r["outcome"] == "applied"]
    assert sorted(r["rank"] for r in init) == [0, 1]


def test_a_device_that_the_script_chose_stays(two_gpus, saferun):
    chosen = "import torch\ntorch.cuda.set_device(1)\ntorch.zeros(1, device='cuda')\n"
    done = saferun(chosen + DEVICE, "--nproc-per-node=1")
    assert [t["device"] for t in done.reported] == [1], done.err[-3000:]


WRONG_DEVICE = source("gpu/wrap_on_wrong_device")


def test_ddp_wrapped_before_the_device_is_set_is_said_with_its_line(two_gpus, saferun):
    done = saferun(WRONG_DEVICE, "--nproc-per-node=2")
    messages = [line for line in done.err.splitlines() if line.startswith("saferun:")]
    place = f"job.py:{line_of(WRONG_DEVICE, '# here')}"
    assert any(place in line and "device" in line for line in messages), done.err[-3000:]
