"""Ranks of NCCL that wait for one: it is named by the recorder, RAS and its stack, in time.

The times of the watch are a tenth of the usual ones, but for those that ranks and NCCL have to
answer: `pytest -n 0 tests/gpu/real/test_stalls_gpu.py` takes two to three minutes.
"""

import os
import signal
import sys

import pytest
from repo import ROOT
from runs import program, run
from sandbox import text_of

PROGRAM = str(ROOT / "tests" / "programs" / "gpu" / "nccl_hang.py")
FAST = [sys.executable, program("fast_watch")]
RECORDER = ["TORCH_FR_BUFFER_SIZE=2000", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"]
ARGV = [word for setting in RECORDER for word in ("--set", f"env.{setting}")]
ARGV += ["--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("fault", ["loop", "stop", "missing"])
def test_a_rank_that_does_not_enter_a_collective_is_named_and_the_stacks_are_kept(
    tmp_path, gpus, fault
):
    with run(tmp_path, "--set=watch.mode=warn", *ARGV, PROGRAM, fault, command=FAST) as job:
        if fault == "stop":
            job.wait_for_message("rank 0 waits for it in ")
            os.kill(job.ranks()[1], signal.SIGCONT)
            assert job.end(200) == 0
        else:
            job.wait_for_event("stall")
            if fault == "missing":
                job.wait_for_message("rank 0 waits for it in ")
            job.process.terminate()
            job.end(200)
        job.nothing_lives()
        first = job.events("stall")[0]
        stacks = [text_of(path) for path in job.journal.glob("receipts/*-rank0-*.stacks")]
    print(first["line"], "\n", job.err)
    what = f"is at {PROGRAM}:" if fault != "stop" else "is stopped, by a signal or a debugger"
    assert first["line"].startswith(f"rank 1 {what}"), job.err
    assert ", rank 0 waits for it in all_reduce (" in first["line"]
    assert any("nccl_hang.py" in text for text in stacks)
    said = [line for line in job.messages() if "rank 0 waits for it" in line]
    assert len(said) == (fault != "loop"), "an endless loop may be an evaluation"


def test_a_rank_that_is_gone_ends_the_attempt_long_before_the_limit(tmp_path, gpus):
    if gpus < 2:
        pytest.skip("one GPU: NCCL uses sockets between its ranks, and sees that one is gone")
    argv = ["--set=watch.mode=end", "--set=watch.silence_s=150", "--retries=1", *ARGV]
    with run(tmp_path, *argv, PROGRAM, "leave", command=FAST) as job:
        status = job.end(300)
        job.nothing_lives()
    print(job.err)
    (hang,), (first, _) = job.events("hang"), job.events("ended")
    assert (first["kind"], first["root_rank"]) == ("hang", 1), job.err
    assert "dead, or gives no answer" in first["root_line"]
    assert hang["silent_s"] < 150
    assert status == 0
