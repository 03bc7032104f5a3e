"""Ranks wait for one: it is named, on stderr too where it was never so long, and ends nothing.

All times of the watch are a tenth of the usual ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import children, until
from runs import Run, program, ran, run

pytestmark = pytest.mark.slow
FAST = [sys.executable, program("fast_watch")]
LOUD = "ranks wait for it in all_reduce"


def stalling(tmp_path: Path, *deeds: str, settings: list[str], start: Any = run, **env: str) -> Run:
    argv = ["--profile=cpu", "--nproc-per-node=3", *settings]
    script = [program("stalling"), str(tmp_path), *deeds]
    return start(tmp_path, *argv, *script, env=env, command=FAST)


def stalls(job: Run) -> list[dict[str, Any]]:
    return job.events("stall")


def said(job: Run) -> list[str]:
    return [line for line in job.messages() if LOUD in line]


def test_a_stopped_rank_is_said_once_and_the_job_goes_on(tmp_path):
    with stalling(tmp_path, "stop", settings=[]) as job:
        job.wait_for_message(LOUD)
        until(lambda: 0 in job.ranks(), "the rank")
        os.kill(job.ranks()[0], signal.SIGCONT)
        assert job.end() == 0
        assert [bool(one["line"]) for one in stalls(job)] == [True, False]
    (line,) = said(job)
    assert line.startswith("saferun: rank 0 is stopped, by a signal or a debugger, 2 ranks wait ")
    assert not job.events("hang")


def test_a_rank_that_waits_for_what_never_comes_is_said_with_its_line(tmp_path):
    with stalling(tmp_path, "take_lock", settings=[]) as job:
        job.wait_for_message(LOUD)
        with open(tmp_path / "0.fifo", "w", encoding="utf-8"):
            pass
        assert job.end() == 0
    (line,) = said(job)
    assert line.startswith(f"saferun: rank 0 is at {program('stalling')}:")
    assert " in take_lock, 2 ranks wait for it in all_reduce (" in line


def test_a_rank_that_sleeps_is_said_with_the_key_that_shows_more_and_next_time_later(tmp_path):
    with stalling(tmp_path, "sleep", "take_lock", settings=[]) as job:
        job.wait_for_message(f" in sleep, 2 {LOUD}")
        (tmp_path / "0").touch()
        job.wait_for_message(f" in take_lock, 2 {LOUD}")
        with open(tmp_path / "1.fifo", "w", encoding="utf-8"):
            pass
        assert job.end() == 0
        assert len(stalls(job)) == 4
    first, _ = said(job)
    assert first.startswith(f"saferun: rank 0 is at {program('stalling')}:")
    assert " in sleep, 2 ranks wait for it in all_reduce (" in first
    assert first.endswith("; Ctrl-\\ (SIGQUIT) shows where all ranks are")
    took_s = [float(line.rpartition("all_reduce (")[2].partition(" s)")[0]) for line in said(job)]
    assert took_s[0] >= 6
    assert took_s[1] >= 2 * took_s[0]


def test_the_wait_for_a_rank_that_did_nothing_is_no_work_that_is_done_again(tmp_path):
    """As where a node is gone for good: no step came after the checkpoint, but a long silence."""
    resume = ["--set", f"retry.resume.checkpoints={tmp_path}/step-*.bin"]
    resume += ["--set", "retry.resume.args=['{step}']", "--set=retry.backoff_s=[0, 0]"]
    with stalling(tmp_path, "sleep", settings=resume) as job:
        job.wait_for_message(f" in sleep, 2 {LOUD}")
        (saved := tmp_path / "step-13.bin").write_bytes(bytes(4096))
        (stall,) = stalls(job)
        began_s = stall["at"] - stall["silent_s"]
        os.utime(saved, (began_s, began_s))
        os.kill(job.ranks()[0], signal.SIGKILL)
        assert job.end() == 0
        lost = job.events("ended")[0]["lost_work"]
    assert (lost["s"], lost["steps"], lost["checkpoint"]) == (0.0, 0, str(saved)), job.err
    assert lost["idle_s"] >= 6
    assert f"saferun: attempt 2 goes on from {saved} (step 13)" in job.messages()


def test_a_rank_that_works_is_said_only_where_it_never_took_so_long(tmp_path):
    """The first evaluation has nothing to be compared with, however long it takes."""
    with stalling(tmp_path, "evaluate", "evaluate", settings=[]) as job:
        job.wait_for_event("stall")
        watch = [sys.executable, "-m", "saferun", "runs", "watch", "--json"]
        with subprocess.Popen(watch, env=job.environ, stdout=subprocess.PIPE, text=True) as shown:
            seen = json.loads(shown.stdout.readline())
            shown.terminate()
        asked = job.journal / "receipts"
        until(lambda: _answers(asked) >= 3, "it is asked again, when it could be said")
        (tmp_path / "0").touch()
        until(lambda: len(stalls(job)) == 2, "its end")
        job.wait_for_message(LOUD)
        (tmp_path / "1").touch()
        assert job.end() == 0
        first, _, second, _ = stalls(job)
    assert " in evaluate, 2 ranks wait for it in all_reduce (" in first["line"]
    assert len(said(job)) == 1
    assert first["silent_s"] < 12
    assert seen["jobs"][0]["stall"] == first["line"]
    assert second["line"]


def test_a_wait_before_all_were_stopped_says_nothing_of_how_long_one_takes(tmp_path):
    """As in a container that is paused: what works on afterwards has not been waited for longer."""
    with stalling(tmp_path, "evaluate", settings=[]) as job:
        job.wait_for_event("stall")
        everyone = [job.process.pid]
        for pid in everyone:
            everyone += children(pid)
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(10)  # the pause itself: the watch knows one by looks that are over 8 s apart
        asked = job.journal / "receipts"
        before = _answers(asked)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        until(lambda: said(job) or _answers(asked) >= before + 2, "a time when it could be said")
        (tmp_path / "0").touch()
        assert job.end() == 0
    assert not said(job)


def _answers(receipts: Path) -> int:
    """Return how often rank 0 was asked where it is."""
    found = list(receipts.glob("*-rank0-*.stacks"))
    return sum(path.read_text(encoding="utf-8").count("most recent call first") for path in found)


def test_an_endless_loop_is_in_the_journal_at_once_and_on_stderr_as_a_hang(tmp_path):
    settings = ["--set=watch.silence_s=20", "--set=watch.mode=end"]
    job = stalling(tmp_path, "loop_for_ever", settings=settings, start=ran)
    (stall,) = stalls(job)
    first, _ = job.events("ended")
    assert " in loop_for_ever, 2 ranks wait for it in all_reduce (" in stall["line"]
    assert stall["silent_s"] < 20
    assert not said(job)
    assert (first["kind"], first["root_rank"]) == ("hang", 0)


def test_a_job_that_its_own_timeout_ends_is_told_with_the_rank_that_was_waited_for(tmp_path):
    """Gloo's report is that of the ranks that waited; the stacks are from before it."""
    job = stalling(tmp_path, "loop_for_ever", settings=[], start=ran, GROUP_LIMIT_S="15")
    first, _ = job.events("ended")
    report = job.ask("runs", "report", job.journal.name, "--markdown")
    assert (first["kind"], first["root_rank"]) == ("nccl-timeout", 0), job.err
    assert any(
        f"the watch: rank 0 is at {program('stalling')}:" in by for by in first["decided_by"]
    )
    assert " in loop_for_ever (not where the others are)" in report


def test_a_killed_rank_ends_the_job_as_torchrun_ends_it(tmp_path):
    """Nobody has to look for who is missing."""
    with stalling(tmp_path, "take_lock", settings=[]) as job:
        job.wait_for_event("stall")
        os.kill(job.ranks()[0], signal.SIGKILL)
        assert job.end() == 0
        job.nothing_lives()
        first, _ = job.events("ended")
    assert first["root_rank"] == 0
    assert first["kind"] not in ("hang", "nccl-timeout")
