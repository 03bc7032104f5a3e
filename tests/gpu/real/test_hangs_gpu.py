"""Hangs of NCCL: torch's flight recorder is asked through its pipe, and names the rank."""

import pytest
from repo import ROOT
from runs import run

PROGRAM = str(ROOT / "tests" / "programs" / "gpu" / "nccl_hang.py")
WATCH = ["--set", "watch.mode=end", "--set", "watch.silence_s=30", "--retries=1"]
# The recorder is on; with the times it knows which collective a GPU has begun, too.
RECORDER = ["TORCH_FR_BUFFER_SIZE=2000", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"]
RECORDER += ["TORCH_NCCL_ENABLE_TIMING=1"]
SET = [word for setting in RECORDER for word in ("--set", f"env.{setting}")]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("missing", "rank 1 has not entered all_reduce number "),
        ("kernel", "rank 1 has not begun all_reduce number "),
    ],
)
def test_the_recorder_names_the_rank_that_hangs_and_the_job_goes_on(tmp_path, gpus, fault, told):
    with run(tmp_path, *WATCH, *SET, "--standalone", "--nproc-per-node=2", PROGRAM, fault) as job:
        status = job.end(400)
        job.nothing_lives()
    assert any("torch's flight recorder: " + told in line for line in job.messages()), job.err
    first, last = job.events("ended")
    assert (first["kind"], first["root_rank"]) == ("hang", 1)
    assert told in first["root_line"]
    assert (status, last["kind"]) == (0, "no-failure"), job.err
    if fault == "missing":
        line = next(line for line in job.messages() if "not where the others are" in line)
        assert "rank 1 " in line
        assert f"{PROGRAM}:" in line
        assert "in stay_away" in line
        assert f"in which rank 0 waits at {PROGRAM}:" in first["root_line"]


def test_without_the_recorder_the_rank_that_does_not_wait_for_its_gpu_is_named(tmp_path, gpus):
    off = ["--set", "env.TORCH_FR_BUFFER_SIZE=0", "--set", "env.TORCH_NCCL_TRACE_BUFFER_SIZE=0"]
    argv = [*WATCH, *off, "--standalone", "--nproc-per-node=2", PROGRAM, "missing"]
    with run(tmp_path, *argv) as job:
        status = job.end(400)
        job.nothing_lives()
    first, last = job.events("ended")
    assert (first["kind"], first["root_rank"]) == ("hang", 1), job.err
    assert "in stay_away" in first["root_line"]
    waits = [line for line in job.messages() if "waits for its GPU" in line]
    assert ["  rank 0 " in line for line in waits] == [True], job.err
    assert (status, last["kind"]) == (0, "no-failure"), job.err


def test_the_watch_strikes_in_a_program_that_keeps_its_gpu_busy_and_writes_nothing(tmp_path, gpus):
    """A limit that was given holds, whatever the GPU does."""
    watch = ["--set", "watch.mode=warn", "--set", "watch.silence_s=30"]
    text = "import torch\ntorch.cuda._sleep(1 << 60)\ntorch.cuda.synchronize()\n"
    (tmp_path / "job.py").write_text(text, encoding="utf-8")
    with run(tmp_path, *watch, "--nproc-per-node=1", str(tmp_path / "job.py")) as job:
        job.wait_for_message("the job may hang")
        job.process.terminate()
        job.end(120)
        job.nothing_lives()
    assert job.events("hang")
