"""Files of ours that vanish while a run lives: it is tried again and explained all the same."""

import shutil
import signal
from pathlib import Path
from uuid import uuid4

import pytest
from fake_nvml import Nvml, gpu
from helpers import ROOT, living, until
from repo import source
from runs import Run, program, ran, run, small_torchrun
from sandbox import nvidia_smi

KINDS = ["cuda-launch-failure", "peer-lost", "cuda-launch-failure"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the folder of an installed copy of the package."""
    place = tmp_path / "site"
    shutil.copytree(ROOT / "src" / "saferun", place / "saferun")
    for data in ("profiles", "shell"):
        shutil.copytree(ROOT / data, place / "saferun" / "data" / data)
    return place


def fail_three_times_without(files: Path, job: Run) -> None:
    """Take files away in the first of three attempts, and have a rank fail in each of them."""
    for attempt in (1, 2, 3):
        until((job.folder / f"here-{attempt}").exists)
        if attempt == 1:  # the next attempt has been prepared
            until(lambda: list(living(job.mark).values()).count("saferun-keeper") == 2)
            files.rename(files.with_name("gone"))
        (job.folder / f"go-{attempt}").touch()
    assert job.end() == 1
    assert [event["kind"] for event in job.events("ended")] == KINDS
    assert job.events("fault") == []
    assert "the run failed: " in job.err
    assert "not tried again: " in job.err  # its reason depends on how long the first one lived
    assert sum("Traceback" in line for line in job.err.splitlines()) == len(KINDS)  # the ranks'
    for attempt in (1, 2, 3):  # the hooks ran in each
        assert list(job.journal.glob(f"receipts/a{attempt}-r0-rank0-pid*.jsonl"))
    assert (job.journal / "hooks").stat().st_mode & 0o777 == 0o700
    job.nothing_lives()


def failing(folder: Path) -> list[str]:
    options = ["--profile=cpu", "--set=retry.backoff_s=[0, 0]", "--nproc-per-node=1"]
    return [*options, program("told_to_fail"), str(folder)]


def test_a_run_outlives_the_package(tmp_path, package):
    env = {**small_torchrun(tmp_path), "PYTHONPATH": str(package)}
    with run(tmp_path, *failing(tmp_path), env=env) as job:
        fail_three_times_without(package / "saferun", job)


GONE = source("faults/take_package_away")


def test_a_package_that_vanishes_with_the_first_line_costs_nothing(tmp_path, package):
    here = package / "saferun"
    (tmp_path / "job.py").write_text(f"{GONE}raise ValueError('of the script')", encoding="utf-8")
    env = {**small_torchrun(tmp_path), "PYTHONPATH": str(package), "HERE": str(here)}
    job = ran(tmp_path, "--profile=cpu", "--nproc-per-node=1", "job.py", env=env, status=1)
    assert [event["kind"] for event in job.events("ended")] == ["user-exception"]
    assert job.events("fault") == []
    assert "saferun's own" not in job.err
    assert not here.exists()


def test_a_driver_is_asked_all_the_same(tmp_path, package):
    uuid = f"GPU-{uuid4()}"
    nvml = Nvml(tmp_path / "nvml")
    nvml.reports(gpu(GetUUID=uuid, **{"value.230": "1"}))
    (tmp_path / "job.py").write_text(f"{GONE}print('odd'); raise SystemExit(1)", encoding="utf-8")
    env = {**small_torchrun(tmp_path), "PYTHONPATH": str(package), "HERE": str(package / "saferun")}
    nvidia_smi(tmp_path / "bin", f"echo 'GPU 0: NVIDIA H100 (UUID: {uuid})'")
    libraries = {"LD_LIBRARY_PATH": str(nvml.folder)}
    argv = ["--profile=cuda", "--nproc-per-node=1", "--retries=1", "job.py"]
    job = ran(tmp_path, *argv, env=env | libraries, status=1)
    assert [event["kind"] for event in job.events("ended")] == ["gpu-lost"], job.err


SAVES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("saved")))
open("up", "w").close()
while True:
    time.sleep(0.1)
"""


def test_a_user_signal_reaches_the_ranks_all_the_same(tmp_path, package):
    (tmp_path / "job.py").write_text(GONE + SAVES, encoding="utf-8")
    here = str(package / "saferun")
    env = {**small_torchrun(tmp_path), "PYTHONPATH": str(package), "HERE": here}
    with run(tmp_path, "--profile=cpu", "--nproc-per-node=1", "job.py", env=env) as job:
        until((tmp_path / "up").exists)
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0, job.err
        assert job.events("fault") == []
    assert job.out == "saved\n"
