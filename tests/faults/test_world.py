"""A world that is in the way: taken ports, full disks, other runs, a driver that hangs.

The launcher is a small one without torch, except where a test is about torchrun.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import slow
from disks import small_disk
from helpers import free_port, has_signal, living, until
from runs import Run, ran, run, small_torchrun
from sandbox import SAFERUN, nvidia_smi, shell, write

UUID = "GPU-5d5ba0d6-0000-1111-2222-333344445555"
STAY = "import signal; print('up', flush=True); signal.pause()"


def script(folder: Path, text: str) -> str:
    return str(write(folder / "train.py", text))


def machine(folder: Path, answer: str) -> dict[str, str]:
    """Return variables of a machine with a small torchrun, whose nvidia-smi is a shell script."""
    nvidia_smi(folder / "bin", answer)
    return small_torchrun(folder)


ONE_GPU = f"echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUID})'"


# --- other runs on the same GPU ----------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a machine with one GPU of its own, so that no other test is in the way."""
    number = f"{os.getpid():012d}"
    answer = ONE_GPU.replace("333344445555", number)
    environ = machine(tmp_path, answer)
    yield environ
    for place in (Path("/run/lock/saferun"), Path("/tmp/saferun-lock")):
        for file in place.glob(f"*{number}*"):
            file.unlink(missing_ok=True)


@pytest.fixture
def small(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with a small torchrun."""
    return small_torchrun(tmp_path)


def test_a_second_run_on_a_gpu_starts_and_names_the_first(tmp_path, gpu):
    argv = ["--nproc-per-node=1", script(tmp_path, STAY)]
    with run(tmp_path, *argv, env=gpu) as first:
        until(first.ranks, "the first runs")
        second = ran(tmp_path, "--nproc-per-node=1", "-m", "this", env=gpu)
        in_use = next(line for line in second.messages() if "in use by" in line)
        assert re.search(r"GPU 0 \(GPU-[0-9a-f]{8}…\) is in use by ", in_use)
        assert f"pid {first.process.pid} of user" in in_use
        assert "train.py" in in_use


@pytest.mark.parametrize("policy", ["refuse", "wait"])
def test_a_second_run_may_be_turned_away(tmp_path, gpu, policy):
    argv = ["--nproc-per-node=1", script(tmp_path, STAY)]
    with run(tmp_path, *argv, env=gpu) as first:
        until(first.ranks, "the first runs")
        options = ["--set", f"locks.gpus={policy}", "--set", "locks.wait_s=0.3"]
        second = ran(tmp_path, *options, *argv, env=gpu, status=75)
        assert f"pid {first.process.pid}" in second.err


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_run_that_waits_starts_when_the_other_ones_last_process_is_gone(tmp_path, gpu, end):
    argv = ["--nproc-per-node=1", script(tmp_path, STAY)]
    waiting = ["--set", "locks.gpus=wait", "--set", "locks.wait_s=600"]
    with run(tmp_path, *argv, env=gpu) as first:
        until(first.ranks, "the first runs")
        with run(tmp_path, *waiting, "--nproc-per-node=1", "-m", "this", env=gpu) as second:
            second.wait_for_message("waiting for")
            assert not second.ranks()
            first.process.send_signal(end)
            assert second.end() == 0, second.err
            assert not living(first.mark)


def test_a_nested_run_does_not_wait_for_itself(tmp_path, gpu):
    argv = ["--nproc-per-node=1", "--rdzv-endpoint=localhost:0", "-m", "this"]
    inner = [sys.executable, "-m", "saferun", *argv]
    text = f"import subprocess, sys; sys.exit(subprocess.call({inner!r}))"
    options = ["--set", "locks.gpus=refuse"]
    env = {**gpu, "SAFERUN_SET": "locks.gpus=refuse"}
    job = ran(tmp_path, *options, "--nproc-per-node=1", script(tmp_path, text), env=env)
    assert "Beautiful is better than ugly" in job.out


# --- files -------------------------------------------------------------------------------------


def test_a_full_disk_under_the_journal_stops_no_job(tmp_path, small):
    text = "import sys; sys.stdout.write('x' * 200_000); print('end')"
    with small_disk(tmp_path / "small", "16k") as place:
        job = ran(tmp_path, "--run-dir", str(place), script(tmp_path, text), env=small)
        assert job.out.endswith("xend\n")
        assert len(job.out) == 200_004
        assert len([line for line in job.messages() if "cannot write" in line]) == 1
        assert len(job.messages()) == 2


@pytest.mark.slow
def test_where_receipts_find_no_room_the_hooks_are_not_reported_missing(tmp_path, small):
    lives = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    with small_disk(tmp_path / "small", "8k") as place:
        with run(tmp_path, "--run-dir", str(place), script(tmp_path, lives), env=small) as job:
            # A second keeper is started right after saferun has looked for the ranks.
            until(lambda: list(living(job.mark).values()).count("saferun-keeper") == 2, "it looks")
            (tmp_path / "go").touch()
            assert job.end() == 0, job.err
        assert not any(file.read_bytes() for file in place.glob("*/receipts/*"))
        assert [line for line in job.messages() if "cannot write" not in line] == job.messages()[:1]


def test_a_home_that_cannot_be_written_stops_no_job(tmp_path, small):
    home = tmp_path / "a file"
    home.write_text("", encoding="utf-8")
    job = ran(tmp_path, "-m", "this", env={**small, "HOME": str(home)})
    assert len(job.messages()) == 2, job.messages()
    assert sum("the job goes on" in message for message in job.messages()) == 1


def test_a_journal_that_vanishes_in_the_middle_stops_no_job(tmp_path, small):
    text = "import shutil, sys; shutil.rmtree(sys.argv[1]); print('gone')"
    runs = tmp_path / "runs"
    argv = ["--run-dir", str(runs), script(tmp_path, text), str(runs)]
    # As torchrun sets it: a rank then writes a receipt at its end.
    own = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    job = ran(tmp_path, *argv, env={**small, **own})
    assert job.out == "gone\n"
    assert not runs.exists()  # nor comes a half of it back


# --- the machine -------------------------------------------------------------------------------


def test_an_nvidia_smi_that_hangs_costs_one_line_and_stops_no_job(tmp_path):
    environ = machine(tmp_path, "exec sleep 600")
    job = ran(tmp_path, "-m", "this", env=environ)
    assert len([line for line in job.messages() if "nvidia-smi" in line]) == 1


@pytest.mark.slow
def test_nodes_that_come_late_meet_in_a_second_attempt(tmp_path):
    """A rendezvous that timed out alone is tried again; node numbers of attempts may differ."""
    argv = [
        *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=late"),
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-conf=join_timeout=20",  # a torchrun starts in that time on a loaded machine, too
        "--set=retry.backoff_s=[0.1,0.2]",
        script(tmp_path, "import os; print('met', os.environ['WORLD_SIZE'], flush=True)"),
    ]
    with run(tmp_path, *argv) as early:
        early.wait_for_message("attempt 1 failed")
        with run(tmp_path, *argv) as late:
            assert [late.end(), early.end()] == [0, 0], (late.err, early.err)
    assert (early.out, late.out) == ("met 2\n", "met 2\n")


# --- the way in which it was started ----------------------------------------------------------


@pytest.mark.parametrize(
    ("closed", "retries"),
    [("2>&-", "0"), ("<&- >&- 2>&-", "2"), *slow(("<&- >&- 2>&-", "0"), ("2>&-", "2"))],
)
def test_closed_descriptors_are_the_jobs_to_find_and_no_lock_files(tmp_path, gpu, closed, retries):
    text = f"open({str(tmp_path / 'ran')!r}, 'w').write('ran'); print('x', flush=True)"
    argv = [f"--retries={retries}", "--nproc-per-node=1", script(tmp_path, text)]
    command = ["bash", "-c", f"exec {shell(*SAFERUN, *argv)} {closed}"]
    with run(tmp_path, command=command, env=gpu) as job:
        job.end()
        job.nothing_lives()
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "ran"
    for place in (Path("/run/lock/saferun"), Path("/tmp/saferun-lock")):
        for file in place.glob(f"*{os.getpid():012d}*"):
            assert file.suffix == ".json" or file.stat().st_size == 0, file


def test_a_run_in_the_background_of_a_script_can_be_interrupted(tmp_path):
    """bash starts `&` jobs with SIGINT ignored; torchrun handles it all the same, and so do we."""
    words = shell(*SAFERUN, "--nproc-per-node=1", script(tmp_path, STAY))
    command = ["bash", "-c", f"{words} & echo $!; wait $!"]
    with run(tmp_path, command=command) as job:
        until(job.ranks, "the job runs")
        pid = int(job.process.stdout.readline())
        until(lambda: _handles_sigint(job), "torchrun handles SIGINT")
        os.kill(pid, signal.SIGINT)
        assert job.end() == 128 + signal.SIGINT
        job.nothing_lives()


def _handles_sigint(job: Run) -> bool:
    (agent,) = job.processes("torchrun")
    return has_signal(agent, "SigCgt", signal.SIGINT)


def test_a_job_whose_reader_has_gone_is_not_started_again(tmp_path):
    text = "import itertools\nfor i in itertools.count(): print('line', i, flush=True)"
    words = shell(*SAFERUN, "--nproc-per-node=1", script(tmp_path, text))
    command = ["bash", "-c", f"set -o pipefail; {words} | head -1"]
    job = ran(tmp_path, command=command, env=small_torchrun(tmp_path), status=1)
    (ended,) = job.events("ended")
    assert job.out == "line 0\n"
    assert ended["kind"] == "output-reader-gone", job.err
