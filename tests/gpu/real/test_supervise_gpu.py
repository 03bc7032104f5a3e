"""Supervision where GPUs are: their memory is free again, NCCL jobs come back, causes are named."""

import json
import os
import pathlib
import re
import signal
import subprocess

import pytest
from helpers import awaits_its_task, living, until
from repo import source
from runs import run
from sandbox import text_of, write

JOB = source("gpu/nccl_job")


def script(folder: pathlib.Path, text: str = JOB) -> str:
    return str(write(folder / "job.py", text))


def used_mib() -> int:
    """GPU memory in use on all GPUs, by nvidia-smi."""
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return sum(int(line) for line in done.stdout.split())


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_an_nccl_job_comes_back_after_a_rank_died_and_finds_its_memory_free(
    tmp_path, two_gpus, fault
):
    before = used_mib()
    with run(tmp_path, "--nproc-per-node=2", script(tmp_path), fault) as job:
        assert job.end(180) == 0, job.err
        job.nothing_lives()
    assert job.out.count("finished") == 2
    reported = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", job.out)]
    again = [facts["free"] for facts in reported if facts["attempt"] == "2"]
    assert len(again) == 2
    assert min(again) > 0.95, reported
    assert used_mib() < before + 500


@pytest.mark.parametrize("who", ["saferun", "keeper", "agent"])
def test_no_gpu_memory_stays_with_anybody_whoever_is_killed(tmp_path, two_gpus, who):
    before = used_mib()
    with run(tmp_path, "--nproc-per-node=2", script(tmp_path)) as job:
        until(lambda: used_mib() > before + 40_000, "the ranks hold their memory", 90)
        victims = {
            "saferun": job.process.pid,
            "keeper": job.keeper(),
            "agent": child_of(job.keeper()),
        }
        os.kill(victims[who], signal.SIGKILL)
        if who != "saferun":
            until(lambda: '"attempt": "2"' in _receipt_names(job), "the second attempt", 60)
            job.process.terminate()
            job.end(60)
        job.nothing_lives()
        until(lambda: used_mib() < before + 500, "the memory is free", 20)


def child_of(pid: int) -> int:
    return int(text_of(pathlib.Path(f"/proc/{pid}/task/{pid}/children")).split()[0])


def _receipt_names(job) -> str:
    names = [p.name for p in (job.journal / "receipts").glob("a2-*")]
    return '"attempt": "2"' if names else ""


ASSERTED = """
import torch
logits, labels = torch.randn(4, 3, device="cuda"), torch.tensor([0, 1, 2, 7], device="cuda")
print(torch.nn.functional.cross_entropy(logits, labels).item())
"""
MEMORY = """
import torch
keep = [torch.ones(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(100)]
"""


@pytest.mark.parametrize(("text", "kind"), [(ASSERTED, "device-side-assert"), (MEMORY, "cuda-oom")])
def test_what_failed_on_the_gpu_is_named_and_not_tried_again(tmp_path, gpus, text, kind):
    with run(tmp_path, "--nproc-per-node=1", script(tmp_path, text)) as job:
        assert job.end(180) == 1
        kinds = [ended["kind"] for ended in job.events("ended")]
        job.nothing_lives()
    assert kinds == [kind], job.err


def test_the_warm_agent_opens_no_gpu(tmp_path, gpus):
    text = (
        "import time, torch; torch.ones(1, device='cuda'); print('up', flush=True); time.sleep(60)"
    )
    with run(tmp_path, "--nproc-per-node=1", script(tmp_path, text)) as job:
        waiting = until(lambda: _named(job, "saferun-warm"), "the agent waits", 60)
        until(lambda: awaits_its_task(waiting), "its import is through", 60)
        opened = [
            os.readlink(f"/proc/{waiting}/fd/{fd}") for fd in os.listdir(f"/proc/{waiting}/fd")
        ]
        assert not [path for path in opened if path.startswith("/dev/nvidia")]
        job.process.terminate()
        job.end(60)
        job.nothing_lives()


def _named(job, name: str) -> int:
    return next((pid for pid, comm in living(job.mark).items() if comm == name), 0)


def test_torchruns_own_restart_of_an_nccl_job_works_under_saferun(tmp_path, two_gpus):
    argv = ["--retries=0", "--max-restarts=1", "--nproc-per-node=2"]
    counted = ["SIGKILL", "TORCHELASTIC_RESTART_COUNT"]
    with run(tmp_path, *argv, script(tmp_path), *counted) as job:
        assert job.end(120) == 0, job.err
        job.nothing_lives()
    assert job.out.count("finished") == 2
