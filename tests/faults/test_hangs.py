"""A job that hangs is told of, with the rank that is elsewhere; the job is left alone."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers import living, until
from runs import program, run, small_torchrun, staying
from sandbox import SAFERUN, Sandbox, executable, python_program, shell
from terminals import Terminal


@pytest.mark.parametrize("key", ["watch.mode=end", "watch.mode=warn"])
def test_a_single_attempt_that_hangs_is_ended_where_that_is_asked_for(tmp_path, key):
    """One attempt is no reason to leave the job alone: `warn` reports and leaves it, `end` ends."""
    argv = ["--profile=cpu", "--set=launcher=python", "--set=retry.attempts=1", f"--set={key}"]
    code = "import time; print('here', flush=True); time.sleep(600)"
    with run(tmp_path, *argv, "--set=watch.silence_s=1", "-c", code) as job:
        job.wait_for_message("the job may hang")
        if key == "watch.mode=warn":
            assert job.process.poll() is None
            job.process.send_signal(signal.SIGTERM)
        assert job.end()
        job.nothing_lives()
        (ended,) = job.events("ended")
    assert ended["ended_by"] == ("hang" if key == "watch.mode=end" else "job")


def test_the_key_at_a_terminal_asks_where_the_ranks_are_and_ends_nothing(tmp_path):
    machine = Sandbox(tmp_path, **small_torchrun(tmp_path))
    terminal = Terminal(machine.environ)
    with contextlib.closing(machine):
        terminal.type(f"{shell(*SAFERUN, '--set=watch.mode=warn', *staying(tmp_path))}\n")
        for _ in range(2):  # and it can be asked again
            until(lambda: len(ranks_of(machine.mark)) == 2, "both ranks run")
            before = ranks_of(machine.mark)
            terminal.type("\x1c", rb"saferun: where the ranks are:", rb"rank 1 \(pid (\d+)\)")
            assert ranks_of(machine.mark) == before
            assert b"may hang" not in terminal.seen
        terminal.type("\x03", rb"READY\$ ")
        until(lambda: len(machine.living()) == 1, "all but the shell have ended")
    terminal.end()


def ranks_of(mark: str) -> set[int]:
    """Return the pids of the counting job's ranks."""
    found = set()
    for pid in living(mark):
        with contextlib.suppress(OSError, StopIteration):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if next(w for w in words[1:] if w != b"-u").endswith(b"/counting_job.py"):
                found.add(pid)
    return found


@pytest.mark.slow
def test_without_the_watch_nothing_is_said(tmp_path):
    mode = ["--set", "watch.mode=off", "--set", "watch.silence_s=1"]
    with run(tmp_path, *mode, *staying(tmp_path), env=small_torchrun(tmp_path)) as job:
        until(lambda: set(job.ranks()) == {0, 1}, "both ranks run")
        job.process.send_signal(signal.SIGQUIT)  # which ends nothing
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 1
        assert "asked to end" in job.events("end")[0]["reason"]
    assert "hang" not in job.err
    assert "where the ranks" not in job.err


@pytest.mark.slow
def test_py_spy_shows_a_rank_that_answers_no_signal(tmp_path):
    """Its hooks are off, so that it could not be asked; the stacks hold no secret of its words."""
    watch = ["--set", "watch.mode=warn", "--set", "watch.silence_s=8"]
    argv = ["--profile=cpu", "--set", "hooks.excepthook=off", "--nproc-per-node=2"]
    script = [program("hanging_rank"), "loop", "--password=hunter22hunter22"]
    env = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    with run(tmp_path, *watch, *argv, *script, env=env) as job:
        job.wait_for_message("all stacks")
        job.process.send_signal(signal.SIGTERM)
        job.end()
        job.nothing_lives()
        (event,) = job.events("hang")
        stacks = (job.journal / event["stacks"]).read_text(encoding="utf-8")
    line = next(line for line in job.messages() if "not where the others are" in line)
    assert "hanging_rank.py" in line
    assert " in loop_for_ever" in line
    assert "loop_for_ever" in stacks
    assert "libtorch" in stacks
    assert "hunter22" not in stacks


SLOW_PY_SPY = """\
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[sys.argv.index("--pid") + 1])
assert libc.ptrace(16, pid, None, None) == 0  # PTRACE_ATTACH
time.sleep(600)
"""


@pytest.mark.slow
def test_a_slow_py_spy_makes_no_rank_a_suspect(tmp_path):
    """It holds both ranks until it is ended; the one in an endless loop is still the one named."""
    slow = executable(tmp_path / "bin" / "py-spy", python_program(SLOW_PY_SPY))
    end = ["--set", "watch.mode=end", "--set", "watch.silence_s=8", "--retries=1"]
    argv = ["--profile=cpu", "--nproc-per-node=2", program("hanging_rank"), "loop"]
    env = {"PATH": f"{slow.parent}:{os.environ['PATH']}"}
    with run(tmp_path, *end, *argv, env=env) as job:
        job.wait_for_message("attempt 1 failed")
        job.process.send_signal(signal.SIGTERM)
        job.end()
        job.nothing_lives()
        first = job.events("ended")[0]
    assert (first["kind"], first["root_rank"]) == ("hang", 1)
    assert " in loop_for_ever" in first["root_line"]
    assert "is stopped" not in job.err
