"""Faults in whole runs: the real torchrun, real ranks, real signals.

For each: the outcome promised, no process left, the exit status as documented. One run trains the
example with torch; in the others the ranks need none.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow
from helpers import DEADLINE_S, living, parent, until
from runs import Run, counting, example, program, ran, run, small_torchrun, staying
from sandbox import text_of, write


@pytest.mark.slow
@pytest.mark.parametrize("way", ["live", "script"])
def test_a_killed_rank_of_a_real_training_is_survived(tmp_path, way):
    command, argv = [sys.executable, "-m", "saferun"], example(tmp_path, "SIGKILL")
    if way == "script":
        make = [*command, "gen-shell", *argv[:2], "-o", "run.sh", "--", *argv[2:]]
        subprocess.run(make, cwd=tmp_path, check=True)
        command, argv = ["bash", "run.sh"], []
    job = ran(tmp_path, *argv, command=command)
    assert "done step=20" in job.out
    assert "resumed at step 10" in job.out
    assert "at the beginning" not in job.err, "it has a --resume of its own"
    assert [e["kind"] for e in job.events("ended")] == ["killed-from-outside", "no-failure"]
    receipts = [text_of(path).splitlines() for path in job.journal.glob("receipts/*.jsonl")]
    hooks = {json.loads(line).get("hook") for lines in receipts for line in lines}
    assert {"init", "excepthook"} <= hooks


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("SIGSEGV", "segfault"),
        *slow(
            ("SIGBUS", "bus-error"),
            ("SIGABRT", "abort-unknown"),
            ("SIGTERM", "sigterm-preempted"),
            ("SIGALRM", "ended-by-signal"),
        ),
    ],
)
def test_a_rank_that_dies_of_a_signal_is_survived(tmp_path, fault, kind):
    job = ran(tmp_path, *counting(tmp_path, fault))
    assert "done step=20" in job.out
    assert "resumed at step 10" in job.out
    assert [e["kind"] for e in job.events("ended")] == [kind, "no-failure"]
    _, failed, succeeded = job.messages()
    assert "attempt 1 failed after" in failed
    assert f"{kind} on rank 1" in failed
    assert succeeded == "saferun: attempt 2 succeeded"
    assert open_to_others(job.home) == []


def open_to_others(home: Path) -> list[str]:
    """Return what saferun wrote there that other users may read or write."""
    return [
        str(path)
        for path in home.rglob("*")
        if "saferun" in str(path.relative_to(home))
        and not path.is_symlink()
        and path.lstat().st_mode & 0o077
    ]


@pytest.mark.parametrize(
    ("fault", "kind"), [*slow(("exit3", "child-failed-no-root")), ("raise", "user-exception")]
)
def test_a_fault_of_the_script_is_explained_and_not_tried_again(tmp_path, fault, kind):
    job = ran(tmp_path, *counting(tmp_path, fault), status=1)
    (ended,) = job.events("ended")
    assert (ended["kind"], ended["action"]) == (kind, "stop")
    messages = job.messages()
    assert any(
        "the run failed: " in line and f"({kind} on rank 1, host" in line for line in messages
    ), job.err
    assert messages[-1] == f"saferun: journal: {job.journal}"
    assert len(messages) <= 15


def test_a_job_that_crashes_after_its_end_is_not_done_again(tmp_path):
    ends = tmp_path / "ends"
    ends.mkdir()
    script = [program("crash_at_exit"), str(ends)]
    job = ran(tmp_path, "--profile=cpu", "--nproc-per-node=2", *script, status=1)
    (ended,) = job.events("ended")
    assert (ended["kind"], job.out.count("saved")) == ("crash-after-the-end", 2)


@pytest.mark.slow
def test_a_rank_that_crashes_at_its_end_while_another_works_is_survived(tmp_path):
    script = [program("crash_at_exit"), "unless-second"]
    job = ran(tmp_path, "--profile=cpu", "--nproc-per-node=2", *script)
    assert [e["kind"] for e in job.events("ended")] == ["segfault", "no-failure"]


@pytest.mark.slow
def test_a_failure_that_comes_again_at_the_same_age_is_not_tried_for_ever(tmp_path):
    job = ran(tmp_path, *counting(tmp_path, "SIGSEGV", step=3, attempts="any"), status=1)
    assert len(job.events("ended")) == 2
    assert "it would happen again" in job.err


@pytest.mark.parametrize("who", [*slow("agent"), "keeper"])
def test_the_death_of_a_process_between_us_and_the_ranks_is_survived(tmp_path, who):
    env = small_torchrun(tmp_path) if who == "keeper" else {}
    with run(tmp_path, *staying(tmp_path), env=env) as job:
        first = both_ranks(job, attempt=1)
        victim = job.keeper() if who == "keeper" else job.processes("torchrun")[0]
        os.kill(victim, signal.SIGKILL)
        second = both_ranks(job, attempt=2, but=first)
        assert not set(first.values()) & set(living(job.mark))
        assert set(second) == {0, 1}
        job.process.terminate()
        assert job.end() == 1
        job.nothing_lives()
        if who == "keeper":
            assert job.events("ended")[0]["root_line"] == "saferun's keeper was killed"
            assert (
                "keeper-killed (saferun's keeper was killed); the failure is saferun's own"
                in job.err
            )
    if who == "agent":
        assert "(torchrun itself was killed (SIGKILL)); " in job.err


@pytest.mark.parametrize("name", ["SIGINT", *slow("SIGTERM", "SIGHUP")])
def test_a_signal_ends_the_run_for_good(tmp_path, name):
    with run(tmp_path, *staying(tmp_path), env=small_torchrun(tmp_path)) as job:
        both_ranks(job, attempt=1)
        job.process.send_signal(getattr(signal, name))
        assert job.end() == (-signal.SIGINT if name == "SIGINT" else 1)
        (ended,), (end,) = job.events("ended"), job.events("end")
        job.nothing_lives()
    assert ended["signals"] == [name]
    assert ended["reason"] == "it was asked to end"
    assert end["asked"]
    ours = job.err.count("saferun: ")  # a rank may write in the middle of such a line
    assert ours == (2 if name == "SIGINT" else 1), job.err


def test_a_rank_saves_at_a_user_signal_for_as_long_as_it_needs_and_the_job_goes_on(tmp_path):
    """saferun gets it, and the agent, as from Slurm."""
    argv = ["--profile=cpu", "--nproc-per-node=2", program("saves_at_a_signal"), str(tmp_path)]
    with run(tmp_path, *argv) as job:
        up = {"up-0", "up-1"}
        until(lambda: {p.name for p in tmp_path.glob("up-*")} == up, "ranks")
        before = set(living(job.mark))
        job.process.send_signal(signal.SIGUSR1)
        os.kill(parent(job.ranks()[0]), signal.SIGUSR1)
        until((tmp_path / "saving").exists, "rank 0 saves")
        (tmp_path / "gate").touch()
        until((tmp_path / "saved").exists, "rank 0 has saved")
        assert before <= set(living(job.mark))
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.err
        assert text_of(tmp_path / "saved") == "0\n"
        assert (len(job.events("ended")), len(job.messages())) == (1, 1)


@pytest.mark.slow
def test_what_fails_soon_after_a_user_signal_is_tried_again_where_it_can_pass(tmp_path):
    with run(tmp_path, *staying(tmp_path)) as job:
        first = both_ranks(job, attempt=1)
        job.process.send_signal(signal.SIGUSR1)
        os.kill(first[0], signal.SIGKILL)
        both_ranks(job, attempt=2, but=first)
        job.process.terminate()
        assert job.end() == 1
        assert [e["signals"] for e in job.events("ended")] == [["SIGUSR1"], ["SIGTERM"]]


FAILS = """
import os, sys
print("attempt", os.environ["SAFERUN_ATTEMPT"], flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("name", "backoff"),
    [("SIGTERM", "0"), ("SIGINT", "600")],
    ids=["without a wait", "before the wait"],
)
def test_a_signal_between_two_attempts_ends_the_run(tmp_path, name, backoff):
    """A full pipe on stderr holds saferun after the attempt's end, before it waits."""
    write(tmp_path / "t.py", FAILS)
    settings = ["--set=launcher=python", f"--set=retry.backoff_s=[{backoff}, {backoff}]"]
    argv = ["--profile=cpu", *settings, str(tmp_path / "t.py")]
    read_end, write_end = os.pipe()
    try:
        with run(tmp_path, *argv, stdin=subprocess.PIPE, stderr=write_end) as job:
            assert job.process.stdout.readline() == b"attempt 1\n"
            fill(write_end)
            job.process.stdin.close()
            until(lambda: job.events("ended"), "the attempt's end")
            job.process.send_signal(signal.SIGQUIT)  # which ends nothing
            job.process.send_signal(getattr(signal, name))
            os.close(write_end)
            write_end = -1
            with open(read_end, "rb", closefd=False) as reader:
                reader.read()
            number = getattr(signal, name)
            status = -number if name == "SIGINT" else 128 + number
            assert job.process.wait(DEADLINE_S) == status
            (attempt,), (end,) = job.events("attempt"), job.events("end")
            assert job.events("ended")[0]["action"] == "again"
            assert (attempt["attempt"], end["status"]) == (1, 128 + getattr(signal, name))
            assert job.process.stdout.read() == b""
            job.nothing_lives()
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def fill(write_end: int) -> None:
    """Fill a pipe."""
    os.set_blocking(write_end, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b" " * size)
    os.set_blocking(write_end, True)


@pytest.mark.slow
def test_no_byte_is_lost_that_is_written_after_a_ranks_death(tmp_path):
    job = ran(tmp_path, *counting(tmp_path, "orphan-output"))
    assert "written after the rank's death\n" in job.out
    assert "done step=20" in job.out


def both_ranks(job: Run, attempt: int, but: dict[int, int] | None = None) -> dict[int, int]:
    """Return {rank: pid} once both ranks run this attempt, and none is of those that were."""
    before = set((but or {}).values())

    def ready() -> dict[int, int] | None:
        found = job.ranks()
        fresh = set(found) == {0, 1} and not before & set(found.values())
        return found if fresh and receipts(job, attempt) >= 2 else None

    return until(ready, "both ranks run")


def receipts(job: Run, attempt: int) -> int:
    """Return how many processes of an attempt have saferun's hooks."""
    return len(list((job.journal / "receipts").glob(f"a{attempt}-*")))


def refusing(folder: Path, module: str) -> dict[str, str]:
    """Return variables with which a module cannot be imported in any Python."""
    place = folder / "lib"
    place.mkdir()
    shutil.copy(program("refuse_import"), place / "sitecustomize.py")
    return {"PYTHONPATH": str(place), "REFUSED_MODULE": module}


@pytest.mark.slow
def test_a_broken_hook_stops_no_job(tmp_path):
    write(tmp_path / "t.py", "import torch\nprint('done')\n")
    env = refusing(tmp_path, "_saferun.inject.hooks.compile.hook")
    job = ran(tmp_path, "--profile=cpu", str(tmp_path / "t.py"), env=env)
    assert job.out == "done\n"
    refused = "hook compile: RuntimeError: refused by the test; the job goes on without it"
    assert refused in job.err


def test_a_fault_of_ours_beside_a_running_job_is_the_journals_alone(tmp_path):
    """What is looked at beside the job, the job does not need."""
    write(tmp_path / "t.py", "print('done')\n")
    (tmp_path / "lib").mkdir()
    shutil.copy(program("refuse_look"), tmp_path / "lib" / "sitecustomize.py")
    env = {"PYTHONPATH": str(tmp_path / "lib")} | small_torchrun(tmp_path)
    job = ran(tmp_path, str(tmp_path / "t.py"), env=env)
    assert job.out == "done\n"
    assert "refused by the test" in job.events("fault")[0]["what"]
    assert len(job.messages()) == 1


def test_a_torch_without_its_launcher_is_named(tmp_path):
    lib = tmp_path / "lib" / "torch" / "distributed"
    lib.mkdir(parents=True)
    for place in (lib, lib.parent):
        write(place / "__init__.py", "__version__ = '2.13.0'\n")
    write(tmp_path / "train.py", "")
    env = {"PYTHONPATH": str(tmp_path / "lib"), "PATH": "/usr/bin:/bin"}
    job = ran(tmp_path, "train.py", env=env, status=None)
    assert "torch.distributed.run" in job.err or "no torchrun" in job.err


def test_without_retries_the_launcher_has_our_pid_and_no_keeper_lives(tmp_path):
    with run(tmp_path, "--retries=0", *staying(tmp_path), env=small_torchrun(tmp_path)) as job:
        until(lambda: len(job.ranks()) == 2, "two ranks")
        assert job.processes("torchrun") == [job.process.pid]
        assert "saferun-keeper" not in living(job.mark).values()
        job.process.terminate()
        assert job.end() == 1
        job.nothing_lives()
