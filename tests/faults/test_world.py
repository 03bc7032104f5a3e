"""A world that is in the way: taken ports, full disks, other runs, a driver that hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import living, until
from runs import run

from saferun.supervise.loop import READY_S

UUID = "GPU-5d5ba0d6-0000-1111-2222-333344445555"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
STAY = "import os, signal, time; print('up', flush=True); signal.pause()"


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def machine(folder: Path, answer: str) -> dict[str, str]:
    """A PATH whose nvidia-smi is a shell script."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    program = place / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    return {"PATH": f"{place}:{Path(sys.executable).parent}:/usr/bin:/bin"}


ONE_GPU = f"echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUID})'"


@contextlib.contextmanager
def taken(port: int):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", port))
        holder.listen()
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- other runs on the same GPU ----------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path):
    """Variables of a machine with one GPU of its own, so that no other test is in the way."""
    number = f"{os.getpid():012d}"
    answer = ONE_GPU.replace("333344445555", number)
    environ = machine(tmp_path, answer)
    yield environ
    for place in (Path("/run/lock/saferun"), Path("/tmp/saferun-lock")):
        for file in place.glob(f"*{number}*"):
            file.unlink(missing_ok=True)


def test_a_second_run_on_a_gpu_starts_and_is_told_who_is_there(tmp_path, gpu):
    words = ["--nproc-per-node=1", script(tmp_path, STAY)]
    with run(tmp_path, *words, env=gpu) as first:
        until(first.ranks, "the first runs")
        with run(tmp_path, "--nproc-per-node=1", "-m", "this", env=gpu) as second:
            assert second.end() == 0, second.err
        told = [line for line in second.said() if "in use by" in line]
        assert f"pid {first.process.pid} of user" in told[0]
        assert "train.py" in told[0]


@pytest.mark.parametrize("policy", ["refuse", "wait"])
def test_a_second_run_may_be_turned_away(tmp_path, gpu, policy):
    words = ["--nproc-per-node=1", script(tmp_path, STAY)]
    with run(tmp_path, *words, env=gpu) as first:
        until(first.ranks, "the first runs")
        options = ["--set", f"locks.gpus={policy}", "--set", "locks.wait_s=0.3"]
        with run(tmp_path, *options, *words, env=gpu) as second:
            assert second.end() == 75
            assert not living(second.mark)
        assert f"pid {first.process.pid}" in second.err


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_run_that_waits_starts_when_the_other_ones_last_process_is_gone(tmp_path, gpu, end):
    words = ["--nproc-per-node=1", script(tmp_path, STAY)]
    waiting = ["--set", "locks.gpus=wait", "--set", "locks.wait_s=60"]
    with run(tmp_path, *words, env=gpu) as first:
        until(first.ranks, "the first runs")
        with run(tmp_path, *waiting, "--nproc-per-node=1", "-m", "this", env=gpu) as second:
            until(lambda: "waiting for" in _said_so_far(second), "the second waits")
            assert not second.ranks()
            first.process.send_signal(end)
            assert second.end() == 0, second.err
            assert not living(first.mark)


def test_a_nested_run_does_not_wait_for_itself(tmp_path, gpu):
    words = ["--nproc-per-node=1", "--rdzv-endpoint=localhost:0", "-m", "this"]
    inner = [sys.executable, "-m", "saferun", *words]
    text = f"import subprocess, sys; sys.exit(subprocess.call({inner!r}))"
    options = ["--set", "locks.gpus=refuse"]
    env = {**gpu, "SAFERUN_SET": "locks.gpus=refuse"}
    with run(tmp_path, *options, "--nproc-per-node=1", script(tmp_path, text), env=env) as job:
        assert job.end() == 0, job.err
        job.nothing_lives()
    assert "Beautiful is better than ugly" in job.out


# --- files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    place = folder / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield str(place)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@ROOT_ONLY
def test_a_full_disk_under_the_journal_stops_no_job(tmp_path):
    text = "import sys; sys.stdout.write('x' * 200_000); print('end')"
    with small_disk(tmp_path, "16k") as place:
        with run(tmp_path, "--run-dir", place, script(tmp_path, text)) as job:
            assert job.end() == 0, job.err
            assert job.out.endswith("xend\n")
            assert len(job.out) == 200_004
            job.nothing_lives()
        assert len([line for line in job.said() if "cannot write" in line]) == 1
        assert len(job.said()) == 2


@ROOT_ONLY
@pytest.mark.slow
def test_where_receipts_find_no_room_the_hooks_are_not_said_to_be_missing(tmp_path):
    lives = f"import time; time.sleep({READY_S + 1})"  # until saferun has seen that there are ranks
    with small_disk(tmp_path, "8k") as place:
        with run(tmp_path, "--run-dir", place, script(tmp_path, lives)) as job:
            assert job.end() == 0, job.err
        assert not any(file.read_bytes() for file in Path(place).glob("*/receipts/*"))
        assert [line for line in job.said() if "cannot write" not in line] == job.said()[:1]


def test_a_home_that_cannot_be_written_stops_no_job(tmp_path):
    home = tmp_path / "a file"
    home.write_text("")
    with run(tmp_path, "-m", "this", env={"HOME": str(home)}) as job:
        assert job.end() == 0, job.err
        job.nothing_lives()
    assert len(job.said()) == 2, job.said()
    assert "the job goes on" in job.said()[1]


def test_a_journal_that_vanishes_in_the_middle_stops_no_job(tmp_path):
    text = "import shutil, sys; shutil.rmtree(sys.argv[1]); print('gone')"
    runs = tmp_path / "runs"
    with run(tmp_path, "--run-dir", str(runs), script(tmp_path, text), str(runs)) as job:
        assert job.end() == 0, job.err
        job.nothing_lives()
    assert job.out == "gone\n"


# --- the machine -------------------------------------------------------------------------------


def test_an_nvidia_smi_that_hangs_costs_bounded_time_and_one_line(tmp_path):
    environ = machine(tmp_path, "exec sleep 600")
    with run(tmp_path, "-m", "this", env=environ) as job:
        assert job.end(60) == 0, job.err
        job.nothing_lives()
    assert len([line for line in job.said() if "nvidia-smi" in line]) == 1


def test_a_static_port_that_is_taken_is_named(tmp_path):
    port = free_port()
    words = [f"--master-port={port}", "--nproc-per-node=1", "--set", "mitigate.enabled=false"]
    with taken(port), run(tmp_path, *words, "-m", "this") as job:
        assert job.end() == 1
        job.nothing_lives()
    assert any("port-in-use" in line for line in job.said()), job.err


def test_nodes_that_come_late_meet_in_a_second_attempt(tmp_path):
    """A rendezvous that timed out alone is tried again; node numbers of attempts may differ."""
    port = free_port()
    words = [
        *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=late"),
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-conf=join_timeout=4",
        "--set=retry.backoff_s=[0.1,0.2]",
    ]
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "print(f'sum {int(total)}')\n"
        "dist.destroy_process_group()\n"
    )
    words.append(script(tmp_path, text))
    with run(tmp_path, *words) as early:
        until(lambda: "attempt 1 failed" in _said_so_far(early), "the first timed out", 60)
        with run(tmp_path, *words) as late:
            assert [late.end(), early.end()] == [0, 0], (late.err, early.err)
    assert "sum 2" in early.out + late.out


def _said_so_far(job) -> str:
    os.set_blocking(job.process.stderr.fileno(), False)
    job.heard = getattr(job, "heard", "") + (job.process.stderr.read() or b"").decode()
    return job.heard


# --- the way in which it was started ----------------------------------------------------------


@pytest.mark.parametrize("retries", ["0", "2"], ids=["exec", "supervised"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_the_jobs_to_find_and_no_lock_files(tmp_path, gpu, closed, retries):
    text = f"open({str(tmp_path / 'ran')!r}, 'w').write('ran'); print('x', flush=True)"
    words = f"-m saferun --retries {retries} --nproc-per-node=1 {script(tmp_path, text)}"
    command = ["bash", "-c", f"exec {sys.executable} {words} {closed}"]
    with run(tmp_path, command=command, env=gpu) as job:
        job.end()
        job.nothing_lives()
    assert (tmp_path / "ran").read_text() == "ran"
    for place in (Path("/run/lock/saferun"), Path("/tmp/saferun-lock")):
        for file in place.glob(f"*{os.getpid():012d}*"):
            assert file.suffix == ".json" or file.stat().st_size == 0, file


def test_a_run_in_the_background_of_a_script_can_be_interrupted(tmp_path):
    """bash starts `&` jobs with SIGINT ignored; torchrun hears it all the same, and so do we."""
    words = f"-m saferun --nproc-per-node=1 {script(tmp_path, STAY)}"
    command = ["bash", "-c", f"{sys.executable} {words} & echo $!; wait $!"]
    with run(tmp_path, command=command) as job:
        until(job.ranks, "the job runs")
        pid = int(job.process.stdout.readline())
        until(lambda: b"torchrun" in _agent_ready(job), "torchrun hears signals")
        os.kill(pid, signal.SIGINT)
        assert job.end() == 1
        job.nothing_lives()


def _agent_ready(job) -> bytes:
    (agent,) = job.processes("torchrun")
    status = Path(f"/proc/{agent}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return b"torchrun" if caught >> (signal.SIGINT - 1) & 1 else b""


def test_a_job_whose_reader_has_gone_is_not_started_again(tmp_path):
    text = "import time\nfor i in range(2000): print('line', i, flush=True); time.sleep(0.001)"
    words = f"-m saferun --nproc-per-node=1 {script(tmp_path, text)}"
    command = ["bash", "-c", f"set -o pipefail; {sys.executable} {words} | head -1"]
    with run(tmp_path, command=command) as job:
        assert job.end() == 1
        (ended,) = job.events("ended")
        job.nothing_lives()
    assert job.out == "line 0\n"
    assert ended["kind"] == "output-reader-gone", job.err
