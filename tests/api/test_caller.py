"""What ends a program that waits for a run ends the run: nothing is left behind."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from helpers import until
from repo import PROGRAMS
from runs import Run, ran, run, small_torchrun, staying

CALLER = [sys.executable, str(PROGRAMS / "api" / "caller.py")]


def calls(folder: Path, how: str = "", start: Any = run, **options: Any) -> Run:
    """A program in a process group of its own, as at a terminal."""
    options |= {"env": small_torchrun(folder), "start_new_session": True}
    return start(folder, *staying(folder), command=[*CALLER, how], **options)


def ranks_stay(job: Run) -> None:
    until(lambda: len(list((job.folder / "out").glob("here-1-*"))) == 2, "both ranks")


@pytest.mark.parametrize(
    ("how", "number", "raised"),
    [("", signal.SIGINT, "KeyboardInterrupt"), *slow(("raises", signal.SIGALRM, "TimeoutError"))],
)
def test_an_exception_ends_the_run_and_is_raised_then(tmp_path, how, number, raised):
    with calls(tmp_path, how) as job:
        ranks_stay(job)
        os.killpg(job.process.pid, number)
        assert job.end() == 3, job.err
        job.nothing_lives()
        assert f"raised {raised}" in job.out
        assert job.events("end")[0]["reason"] == "it was asked to end"
        signals = job.events("ended")[0]["signals"]
        assert signals == ["SIGINT" if number == signal.SIGINT else "SIGTERM"]


@pytest.mark.parametrize("how", ["thread", "thread-lines"])
def test_an_interrupt_that_is_no_signal_ends_the_run_of_a_caller_that_blocks_it(tmp_path, how):
    job = calls(tmp_path, how, ran, status=3)
    assert "raised KeyboardInterrupt" in job.out
    assert job.events("ended")[0]["ended_by"] == "job"  # it was not deaf to the signal


def test_what_the_function_for_lines_raises_ends_the_run(tmp_path):
    assert "raised LookupError" in calls(tmp_path, "line", ran, status=3).out


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGTERM)])
def test_the_death_of_the_program_ends_the_run(tmp_path, number):
    with calls(tmp_path) as job:
        ranks_stay(job)
        job.process.send_signal(number)
        assert job.end() == -number
        job.nothing_lives()
        assert job.events("end")[0]["reason"] == "it was asked to end"
