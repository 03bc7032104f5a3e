"""Hangs as they happen, each in a real torchrun job: the rank is named, and the loop decides."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rights
from helpers import until
from runs import PROGRAMS, Run, program, run

pytestmark = pytest.mark.slow
END = ["--profile=cpu", "--set", "watch.mode=end", "--set", "watch.silence_s=20", "--retries=1"]
MOST = 15  # lines

# fault: (rank, what it does, its line is in this function)
TRIED_AGAIN = {
    "loop": (1, "computes on", "loop_for_ever"),
    "stop": (1, "is stopped", "stopped"),
    "file": (1, "waits in", "read_file"),
    "early": (1, "has ended", ""),
    "forked-worker": (1, "waits in", "forked_worker"),
    "compile-worker": (1, "waits in", "compile_worker"),
    "input": (0, "waits in", "ask"),
    "recompile": (1, "computes on", "recompile_for_ever"),
}


def hanging(folder: Path, fault: str, path: Path | None = None) -> Run:
    """Run two ranks that hang in the first attempt; stdin stays open and says nothing."""
    kept, stdin = os.pipe()
    argv = ["--nproc-per-node=2", program("hanging_rank"), fault, str(path or folder / "fifo")]
    with run(folder, *END, *argv, stdin=kept) as job:
        job.end()
        job.nothing_lives()
    os.close(kept)
    os.close(stdin)
    return job


def report(job: Run) -> list[str]:
    """Return the lines about where the ranks are."""
    lines = job.messages()
    start = next(n for n, line in enumerate(lines) if "the job may hang" in line)
    told = [line for line in lines[start:] if line.startswith("saferun:  ") or "may hang" in line]
    assert len(told) <= MOST
    return told


@pytest.mark.parametrize("fault", TRIED_AGAIN)
def test_the_rank_that_hangs_is_named_and_the_job_goes_on(tmp_path, fault):
    rank, what, function = TRIED_AGAIN[fault]
    os.mkfifo(tmp_path / "fifo")
    job = hanging(tmp_path, fault)
    assert job.process.returncode == 0, job.err
    (place,) = (line for line in report(job) if "not where the others are" in line)
    assert place.startswith(f"saferun:   rank {rank} (pid ")
    assert what in place
    if function:
        assert f"{program('hanging_rank')}:" in place
        assert f" in {function}" in place
    first, last = job.events("ended")
    assert (first["kind"], first["root_rank"], first["ended_by"]) == ("hang", rank, "hang")
    assert what in first["root_line"]
    assert (first["action"], last["kind"]) == ("again", "no-failure")
    if fault == "forked-worker":
        (worker,) = (line for line in report(job) if "its worker" in line)
        assert worker.endswith(" in __getitem__")


def test_mismatched_collectives_stop_the_run_and_both_lines_are_shown(tmp_path):
    job = hanging(tmp_path, "mismatch")
    assert job.process.returncode
    places = "\n".join(report(job))
    assert "in other_collective" in places
    assert "rank 0 " in places
    (ended,) = job.events("ended")
    assert (ended["kind"], ended["action"]) == ("collective-mismatch", "stop")
    assert "rank 1 at" in ended["root_line"]
    assert "in other_collective" in ended["root_line"]


def test_a_dead_worker_of_a_dataloader_fails_before_the_watch_strikes(tmp_path):
    job = hanging(tmp_path, "dead-worker")
    assert job.process.returncode == 0, job.err
    assert not job.events("hang")
    assert job.events("ended")[0]["root_rank"] == 1


@pytest.fixture
def dead_mount(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file on a file system that answers no more; it comes back to life at the end."""
    if why := rights.missing("mount"):
        pytest.skip(why)
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    place = tmp_path / "mount"
    place.mkdir()
    command = [sys.executable, str(PROGRAMS / "dead_mount.py"), str(place), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"mounted\n"
        yield place / "data"
        server.kill()  # who waits for it gets an error now
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("dead_mount", ["untaken"], indirect=True)
def test_a_read_on_a_dead_file_system_is_named_and_tried_again(tmp_path, dead_mount):
    job = hanging(tmp_path, "file", dead_mount)
    assert job.process.returncode == 0, job.err
    (place,) = (line for line in report(job) if "not where the others are" in line)
    assert "in read_file" in place
    first, last = job.events("ended")
    assert (first["kind"], first["root_rank"]) == ("hang", 1)
    assert last["kind"] == "no-failure"


@pytest.mark.parametrize("dead_mount", ["taken"], indirect=True)
def test_a_rank_that_the_kernel_cannot_end_stops_the_run_with_its_line(tmp_path, dead_mount):
    kept, stdin = os.pipe()
    argv = ["--nproc-per-node=2", program("hanging_rank"), "file", str(dead_mount)]
    with run(tmp_path, *END, *argv, stdin=kept) as job:  # which leaves that rank behind
        assert job.end()
        until(lambda: job.events("ended"), "the end in the journal")
    os.close(kept)
    os.close(stdin)
    (ended,) = job.events("ended")
    assert (ended["kind"], ended["root_rank"]) == ("process-unkillable", 1)
    assert f"on {dead_mount}" in ended["root_line"]
    assert "in read_file" in ended["root_line"]
