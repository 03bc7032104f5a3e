"""Faults in whole runs: the real torchrun, the example script, real signals.

For each: the outcome promised, no process left, the exit status as documented.
"""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from helpers import living, until
from runs import run, training

STEP_12 = "step 12 "


def first_steps(output: str) -> list[int]:
    """Return the first step that each attempt printed."""
    steps = [int(line.split()[1]) for line in output.splitlines() if line.startswith("step ")]
    return [s for before, s in zip([10**9, *steps], steps, strict=False) if s <= before]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("SIGKILL", "killed-from-outside"),
        ("SIGSEGV", "segfault"),
        pytest.param("SIGBUS", "bus-error", marks=pytest.mark.slow),
        pytest.param("SIGABRT", "abort-unknown", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_of_a_signal_is_survived(tmp_path, fault, kind):
    with run(tmp_path, *training(tmp_path, fault)) as job:
        assert job.end() == 0, job.err
        assert "done step=20" in job.out
        assert "resumed at step 10" in job.out
        assert [e["kind"] for e in job.events("ended")] == [kind, "no-failure"]
        job.nothing_lives()
    said = job.said()
    assert len(said) == 3, said
    assert "attempt 1 failed after" in said[1]
    assert f"{kind} on rank 1" in said[1]
    assert said[2] == "saferun: attempt 2 succeeded"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("exit3", "child-failed-no-root"), ("raise", "user-exception")],
)
def test_a_fault_of_the_script_is_explained_and_not_tried_again(tmp_path, fault, kind):
    with run(tmp_path, *training(tmp_path, fault)) as job:
        assert job.end() == 1
        (ended,) = job.events("ended")
        job.nothing_lives()
    assert (ended["kind"], ended["action"]) == (kind, "stop")
    assert any(f"the run failed: {kind} on rank 1" in line for line in job.said()), job.err
    assert job.said()[-1] == f"saferun: journal: {job.journal}"
    assert len(job.said()) <= 15


CRASH_IN_SHUTDOWN = """
import os, signal, sys, time
class Crash:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGSEGV)
kept = Crash()  # the interpreter lets go of it after its last line and its atexit functions
{work}
print("saved", flush=True)
"""


def test_a_job_that_crashes_after_its_end_is_not_done_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CRASH_IN_SHUTDOWN.format(work=""))
    with run(tmp_path, "--profile=cpu", "--nproc-per-node=2", str(script)) as job:
        assert job.end() == 1
        (ended,) = job.events("ended")
    assert (ended["kind"], job.out.count("saved")) == ("crash-after-the-end", 2)


def test_a_rank_that_crashes_at_its_end_while_another_works_is_survived(tmp_path):
    script = tmp_path / "train.py"
    late = (
        "if os.environ['SAFERUN_ATTEMPT'] == '2': os._exit(0)\n"
        "if os.environ['RANK'] == '0': time.sleep(60)"
    )
    script.write_text(CRASH_IN_SHUTDOWN.format(work=late))
    with run(tmp_path, "--profile=cpu", "--nproc-per-node=2", str(script)) as job:
        assert job.end() == 0, job.err
        assert [e["kind"] for e in job.events("ended")] == ["segfault", "no-failure"]


def test_a_failure_that_comes_again_at_the_same_age_is_not_tried_for_ever(tmp_path):
    words = training(tmp_path, "SIGSEGV", step=3, attempts="1,2,3,4,5")
    with run(tmp_path, *words) as job:
        assert job.end() == 1
        assert len(job.events("ended")) == 2
        job.nothing_lives()
    assert "it would come again" in job.err


@pytest.mark.parametrize("who", ["agent", "keeper"])
def test_the_death_of_a_process_between_us_and_the_ranks_is_survived(tmp_path, who):
    with run(tmp_path, *training(tmp_path, steps=4000)) as job:
        first = _training_ranks(job)
        victim = job.keeper() if who == "keeper" else job.processes("torchrun")[0]
        os.kill(victim, signal.SIGKILL)
        second = _training_ranks(job, but=first)
        assert not set(first.values()) & set(living(job.mark))
        assert set(second) == {0, 1}
        job.process.terminate()
        assert job.end() == 1
        job.nothing_lives()


@pytest.mark.parametrize("stopped", [False, True], ids=["agent runs", "agent stopped"])
def test_nothing_outlives_a_saferun_that_is_killed(tmp_path, stopped):
    with run(tmp_path, *training(tmp_path, steps=4000)) as job:
        _training_ranks(job)
        if stopped:
            os.kill(job.processes("torchrun")[0], signal.SIGSTOP)
        job.process.kill()
        job.nothing_lives()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("SIGHUP", "SIGUSR1")]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", *SLOW, "SIGUSR2"])
def test_a_signal_ends_the_run_for_good(tmp_path, name):
    with run(tmp_path, *training(tmp_path, steps=4000)) as job:
        _training_ranks(job)
        job.process.send_signal(getattr(signal, name))
        assert job.end() == 1
        (ended,) = job.events("ended")
        job.nothing_lives()
    assert ended["signals"] == [name]
    assert ended["reason"] == "it was asked to end"
    assert len(job.said()) == 1, job.said()


def test_no_byte_is_lost_that_is_written_after_a_ranks_death(tmp_path):
    with run(tmp_path, *training(tmp_path, "babble")) as job:
        assert job.end() == 0
        job.nothing_lives()
    assert "said after the rank's death\n" in job.out
    assert "done step=20" in job.out


def test_several_runs_at_once_keep_journals_apart(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    shared = {"SAFERUN_RUN_DIR": str(tmp_path / "runs")}
    words = [training(folder, steps=3) for folder in folders]
    with (
        run(folders[0], *words[0], env=shared) as one,
        run(folders[1], *words[1], env=shared) as two,
    ):
        # both on one machine: torchrun's static port is taken for the second
        codes = {one.end(), two.end()}
        assert 0 in codes
    assert len(list((tmp_path / "runs").iterdir())) == 2


def _training_ranks(job, but=None):
    """Return {rank: pid} once both ranks train, that are none of an earlier attempt's."""
    before = set((but or {}).values())

    def ready():
        found = job.ranks()
        attempt = "2" if but else "1"
        fresh = set(found) == {0, 1} and not before & set(found.values())
        return found if fresh and _steps(job, attempt) else None

    return until(ready, "both ranks train", 60)


def _steps(job, attempt):
    receipts = job.journal / "receipts"
    names = [p.name for p in receipts.iterdir()] if receipts.is_dir() else []
    return sum(name.startswith(f"a{attempt}-") for name in names) >= 2


def test_a_broken_hook_stops_no_job(tmp_path):
    words = training(tmp_path, steps=3)
    with run(tmp_path, *words, env={"PYTHONPATH": str(_broken(tmp_path))}) as job:
        assert job.end() == 0, job.err
        job.nothing_lives()


def _broken(folder):
    """A module of the user's that makes our compile hook fail at its import."""
    place = folder / "lib"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuser:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == '_saferun_inject.hooks.compile':\n"
        "            raise ImportError('a hook that raises')\n"
        "sys.meta_path.insert(0, Refuser())\n"
    )
    return place


def test_a_torch_without_its_launcher_is_said(tmp_path):
    lib = tmp_path / "lib" / "torch" / "distributed"
    lib.mkdir(parents=True)
    for place in (lib, lib.parent):
        (place / "__init__.py").write_text("__version__ = '2.13.0'\n")
    (tmp_path / "train.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path / "lib"), "PATH": "/usr/bin:/bin"}
    with run(tmp_path, "train.py", env=env) as job:
        assert job.end() != 0
        job.nothing_lives()
    assert "torch.distributed.run" in job.err or "no torchrun" in job.err


def test_the_supervisor_is_not_there_where_it_is_not_wanted(tmp_path):
    """`--retries 0` is a true exec: the launcher has our pid, and no keeper lives."""
    with run(tmp_path, *training(tmp_path, steps=4000, options=["--retries=0"])) as job:
        until(lambda: len(job.ranks()) == 2, "two ranks")
        assert job.processes("torchrun") == [job.process.pid]
        assert "saferun-keeper" not in living(job.mark).values()
        job.process.terminate()
        assert job.end() == 1
        job.nothing_lives()


def test_what_a_run_leaves_behind_is_private(tmp_path):
    with run(tmp_path, *training(tmp_path, steps=2)) as job:
        assert job.end() == 0, job.err
    found = subprocess.run(
        ["find", str(job.home), "-perm", "/077", "-not", "-type", "l"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line for line in found.stdout.splitlines() if "saferun" in line] == []


def test_a_fault_of_ours_beside_a_running_job_is_the_journals_alone(tmp_path):
    """What is made ready for a next attempt, and what is looked at, the job does not need."""
    broken = tmp_path / "lib"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuser:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'saferun.supervise.evidence': raise RuntimeError('a fault of ours')\n"
        "sys.meta_path.insert(0, Refuser())\n"
    )
    (tmp_path / "t.py").write_text("print('done')\n")
    with run(tmp_path, str(tmp_path / "t.py"), env={"PYTHONPATH": str(broken)}) as job:
        assert job.end() == 0, job.err
        assert job.out == "done\n"
        assert "a fault of ours" in job.events("fault")[0]["what"]
        assert len(job.said()) == 1
        job.nothing_lives()
