"""A rank of NCCL that its host slows down is named by the durations of its collectives."""

import signal
import sys

import pytest
from helpers import until
from runs import LIMIT_S, program, run

RECORDER = ["--set", "env.TORCH_FR_BUFFER_SIZE=2000"]
RECORDER += ["--set", "env.TORCH_NCCL_TRACE_BUFFER_SIZE=2000"]


@pytest.mark.parametrize("factor", [1.0, 1.2, 1.5])
def test_a_rank_that_its_host_slows_down_is_named_and_equal_ones_are_not(
    tmp_path, two_gpus, factor
):
    asked = tmp_path / "asked"
    argv = ["--standalone", "--nproc-per-node=2", program("unequal_ranks"), str(factor)]
    command = [sys.executable, program("asks_soon")]
    with run(tmp_path, *RECORDER, *argv, command=command, env={"ASKED": str(asked)}) as job:
        if factor > 1:
            job.wait_for_message("rank 1 is slow: the others waited for it throughout the last ")
        else:
            until(
                lambda: asked.exists() and asked.read_text(encoding="utf-8").count("\n") > 2,
                "answers",
                LIMIT_S,
            )
        job.process.send_signal(signal.SIGTERM)
        job.end()
        job.nothing_lives()
        found, faults = job.events("slow"), job.events("fault")
    assert faults == []
    assert [event["rank"] for event in found] == ([1] if factor > 1 else [])
    assert all(0.1 < event["share"] < 1 - 1 / factor + 0.1 for event in found)
    assert "preparing to dump" not in job.err, "torch says nothing of it"
