"""A later attempt goes on from the newest complete checkpoint, and from nothing else."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disks import small_disk
from runs import Run, program, ran, run, small_torchrun
from sandbox import captured, unwrapped

CHECKPOINTS = "retry.resume.checkpoints={--out}/checkpoint-*.zip"
ARGS = 'retry.resume.args=["--resume={checkpoint}"]'


def resumable(
    folder: Path,
    *faults: str,
    resume: str = "none",
    backoff: str = "[0, 0]",
    quiet: bool = False,
    start: Callable[..., Run] = ran,
    **options: object,
) -> Run:
    argv = ["--profile=cpu", "--set", "launcher=python", "--set", CHECKPOINTS, "--set", ARGS]
    argv += ["--set", f"retry.backoff_s={backoff}"]  # plain python: its status says the signal
    argv += [program("resumable_job"), f"--resume={resume}", f"--out={folder / 'out'}"]
    argv += [f"--fault={fault}" for fault in faults] + ["--quiet"] * quiet
    return start(folder, *argv, **options)


def undisturbed(folder: Path) -> str:
    command = [sys.executable, program("resumable_job"), f"--out={folder / 'calm'}"]
    return captured(*command, check=True).stdout[-30:]


def started_from(job: Run) -> list[str]:
    return [line for line in job.out.splitlines() if line.startswith("resumed")]


def test_it_goes_on_from_the_newest_checkpoint_and_ends_as_if_undisturbed(tmp_path):
    job = resumable(tmp_path, "1:12:SIGKILL")
    assert started_from(job) == ["resumed at step 10"]
    assert job.out.endswith(undisturbed(tmp_path))
    newest = tmp_path / "out" / "checkpoint-10.zip"
    line = next(m for m in job.messages() if "goes on" in m)
    assert line.startswith(f"saferun: attempt 2 goes on from {newest} (step 10); 2 steps, ")
    lost = job.events("ended")[0]["lost_work"]
    assert (lost["steps"], lost["gpu_hours"], lost["checkpoint"]) == (2, 0.0, str(newest))
    shown = job.ask("runs", "show", job.journal.name).splitlines()
    assert f"(2 steps, since {newest})" in next(line for line in shown if "done again" in line)


def test_a_checkpoint_that_the_crash_cut_in_half_is_passed_over_and_left(tmp_path):
    job = resumable(tmp_path, "1:10:cut")
    assert started_from(job) == ["resumed at step 5"]
    assert job.out.endswith(undisturbed(tmp_path))
    assert "checkpoint-10.zip is skipped: checkpoint-10.zip was cut" in job.err


def test_before_the_first_checkpoint_the_arguments_stay_as_the_user_wrote_them(tmp_path):
    job = resumable(tmp_path, "1:3:SIGKILL")
    assert started_from(job) == []
    assert job.out.endswith(undisturbed(tmp_path))
    assert "attempt 2 starts as you wrote it: no complete checkpoint" in job.err


def test_a_checkpoint_of_an_earlier_training_is_not_taken_for_this_runs(tmp_path):
    undisturbed(tmp_path)
    (tmp_path / "calm").rename(tmp_path / "out")
    job = resumable(tmp_path, "1:3:SIGKILL", "2:7:SIGSEGV")
    assert started_from(job) == ["resumed at step 5"]  # attempt 2 wrote it again; 20 is old


def test_a_checkpoint_that_cannot_be_loaded_leads_to_the_one_before(tmp_path):
    job = resumable(tmp_path, "1:10:garble")
    assert started_from(job) == ["resumed at step 5"]
    assert job.out.endswith(undisturbed(tmp_path))
    kinds = [e["kind"] for e in job.events("ended")]
    assert kinds == ["killed-from-outside", "checkpoint-corrupt", "no-failure"]
    bad = tmp_path / "out" / "checkpoint-10.zip"
    assert f"{bad} could not be loaded and is left as it is; the one before is tried" in job.err


def test_where_there_is_none_before_the_run_ends_and_names_the_bad_one(tmp_path):
    job = resumable(tmp_path, "1:5:garble", status=1)
    assert [e["kind"] for e in job.events("ended")] == ["killed-from-outside", "checkpoint-corrupt"]
    assert "checkpoint-5.zip could not be loaded and is left as it is; there is none" in job.err


def test_a_new_checkpoint_is_progress_where_no_steps_are_printed(tmp_path):
    faults = [f"{number}:{5 * number + 2}:SIGKILL" for number in (1, 2, 3)]
    job = resumable(tmp_path, *faults, quiet=True)
    assert started_from(job) == ["resumed at step 5", "resumed at step 10", "resumed at step 15"]
    assert job.out.splitlines()[-1] == undisturbed(tmp_path).splitlines()[-1]


def test_the_same_end_without_a_new_checkpoint_comes_every_time(tmp_path):
    faults = [f"{number}:7:SIGKILL" for number in (1, 2, 3, 4)]
    job = resumable(
        tmp_path, *faults, quiet=True, env={"SAFERUN_RETRIES": "8"}, status=128 + signal.SIGKILL
    )
    assert started_from(job) == ["resumed at step 5"] * 2
    assert "not tried again: the same failure after the same time" in job.err


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """The job's directory on a file system of 1 MiB and a little."""
    with small_disk(tmp_path / "out", "1100k") as place:
        yield place


def test_a_full_disk_is_waited_for_until_it_is_freed(tmp_path, full_disk):
    with resumable(tmp_path, "1:10:full", backoff="[0, 600]", start=run) as job:
        job.wait_for_message(f"no room for a checkpoint in {full_disk}: waiting for it")
        (full_disk / "ballast").unlink()
        assert job.end() == 0, job.err
    assert started_from(job) == ["resumed at step 5"]
    assert [e["kind"] for e in job.events("ended")] == ["disk-full", "no-failure"]
    assert job.out.endswith(undisturbed(tmp_path))


def test_a_full_disk_that_nobody_frees_ends_the_run(tmp_path, full_disk):
    job = resumable(tmp_path, "1:10:full", status=1)
    assert [e["kind"] for e in job.events("ended")] == ["disk-full"]


def test_a_signal_ends_the_wait_for_a_full_disk(tmp_path, full_disk):
    with resumable(tmp_path, "1:10:full", backoff="[0, 600]", start=run) as job:
        job.wait_for_message("no room for a checkpoint")
        job.process.terminate()
        assert job.end() == 128 + signal.SIGTERM, job.err
    assert [e["kind"] for e in job.events("ended")] == ["disk-full"]
    assert job.err.count("the run failed") == 1


@pytest.mark.parametrize("retries", ["2", "0"], ids=["supervised", "exec"])
def test_a_job_that_slurm_queued_again_goes_on_in_its_first_attempt(tmp_path, retries):
    job = resumable(tmp_path, "1:12:SIGKILL", env={"SAFERUN_SET": "retry.attempts=2"})
    (tmp_path / "out" / "checkpoint-20.zip").unlink()
    (tmp_path / "again").mkdir()
    (tmp_path / "out").rename(tmp_path / "again" / "out")
    again = {"SLURM_RESTART_COUNT": "1", "SAFERUN_RETRIES": retries}
    job = resumable(tmp_path / "again", env=again)
    assert started_from(job) == ["resumed at step 15"]
    assert job.out.endswith(undisturbed(tmp_path))


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_plan_shows_what_a_resumed_attempt_would_run_now(tmp_path, as_json):
    undisturbed(tmp_path)
    (tmp_path / "calm").rename(tmp_path / "out")
    argv = ["plan", *(["--json"] if as_json else []), "--set", CHECKPOINTS, "--set", ARGS]
    argv += ["train.py", "--out", "out", "--resume", "none", "--x"]
    job = ran(tmp_path, *argv)
    if not as_json:
        shown = unwrapped(job.out.partition("a second attempt, if it started now")[2])
        assert "train.py --out out --resume=out/checkpoint-20.zip --x" in shown
        return
    made = json.loads(job.out)
    assert made["script_args"] == ["--out", "out", "--resume", "none", "--x"]
    resumed = made["resumed"]
    assert (resumed["checkpoint"], resumed["step"]) == ("out/checkpoint-20.zip", 20)
    assert resumed["command"][-5:] == ["train.py", "--out", "out", *resumed["command"][-2:]]
    assert resumed["command"][-2:] == ["--resume=out/checkpoint-20.zip", "--x"]


def of_two_ranks(folder: Path, first: str, *argv: str, **options: object) -> Run:
    env = {
        **small_torchrun(folder),
        "SMALL_TORCHRUN_REPORTS": "1",
        "FIRST": first,
        **options.pop("env", {}),
    }
    words = ["--profile=cpu", "--set=retry.backoff_s=[0, 0]", *argv]
    words += ["--nproc-per-node=2", program("first_steps_job")]
    command = [sys.executable, program("fast_watch")]
    return ran(folder, *words, env=env, command=command, **options)


@pytest.mark.parametrize("way", ["text", "redirects", "file"])
def test_an_attempt_whose_ranks_begin_at_different_steps_is_ended(tmp_path, way):
    argv, options = [], {}
    if way == "redirects":
        argv = ["--redirects=3", f"--log-dir={tmp_path}/logs"]
        options = {"env": {"HOW": "own", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}}
    with (tmp_path / "log").open("ab") as log:
        options |= {"stdout": log} if way == "file" else {}
        job = of_two_ranks(tmp_path, "20 0", *argv, **options, status=None)
    assert [e["kind"] for e in job.events("ended")] == ["killed-from-outside", "ranks-differ"]
    assert "ranks begin at different steps: rank 0 at 20, rank 1 at 0" in job.err
    assert "known from: the steps that the ranks print" in job.err


@pytest.mark.parametrize(("first", "said"), [("20 20", 0), ("20 0", 1)])
def test_where_they_need_not_agree_a_difference_is_said_once(tmp_path, first, said):
    agree = "--set=hooks.init.agree=warn"
    job = of_two_ranks(tmp_path, first, agree, env={"LAST": "6"})
    assert job.err.count("ranks begin at different steps: ") == said
