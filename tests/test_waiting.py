"""No test waits for what is dead, and none hangs because of a child."""

import subprocess
import sys

import pytest
from runs import run
from terminals import Terminal


def test_a_wait_ends_with_the_process_that_it_waits_for(tmp_path):
    refused = "--profile=no-such-profile"
    with run(tmp_path, refused, "train.py") as job:
        with pytest.raises(AssertionError, match="not in what it wrote: b'saferun: "):
            job.wait_for_message("attempt 1")
        with pytest.raises(AssertionError, match="has ended with status 78"):
            job.wait_for_event("started")


def test_a_child_does_not_outlive_a_test_that_failed():
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with pytest.raises(ZeroDivisionError), subprocess.Popen(sleeps) as child:
        raise ZeroDivisionError
    assert child.returncode == -9


@pytest.mark.slow
def test_a_terminal_in_which_nothing_runs_is_not_waited_for(tmp_path):
    terminal = Terminal({"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    try:
        terminal.type("false\n")
        with pytest.raises(AssertionError, match="nothing runs"):
            terminal.expect(b"never")
    finally:
        terminal.end()
