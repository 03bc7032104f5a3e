"""A command is bounded in time and output, whatever it does, and leaves nothing behind."""

import contextlib
import os
import pathlib
import shlex
import signal
import threading
import time

import pytest

from saferun.base import proc
from saferun.system import command as bounded

FLOOD = "head -c 64M /dev/zero; exec sleep 30"  # more than is kept, less than the memory


def ends(pid: int) -> bool:
    """Wait until a process is gone or only waits to be reaped; return False after 30 s."""
    end = time.monotonic() + 30
    while proc.start(pid) is not None:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_flood_that_outlives_us_is_stopped_by_the_kernel(tmp_path):
    """The output is kept in memory, and after our end nobody watches its size."""
    status = tmp_path / "status"
    script = f"trap '' PIPE; yes; echo $? >{shlex.quote(str(status))}"
    bounded.run(("sh", "-c", f"setsid sh -c {shlex.quote(script)} & sleep 60"), os.environ, 0.2)
    end = time.monotonic() + 30
    while not status.exists() or not status.read_text(encoding="utf-8"):
        assert time.monotonic() < end, "the flood goes on"
        time.sleep(0.01)
    assert status.read_text(encoding="utf-8") == "1\n"


@pytest.mark.parametrize(
    ("command", "status", "trouble"),
    [
        ("exit 3", 3, "exit status 3"),
        ("true", 0, ""),
        ("kill -9 $$", -9, "killed by SIGKILL"),
        ("sleep 30", None, "did not end within 0.3 s"),
        ("trap '' TERM; sleep 30 & sleep 30", None, "did not end"),
        (FLOOD, None, "wrote more than"),
    ],
)
def test_a_command_is_bounded(command, status, trouble):
    timeout_s = 10 if command == FLOOD else 0.3
    answer = bounded.run(("/bin/sh", "-c", command), os.environ, timeout_s)
    assert answer.status == status
    assert trouble in answer.trouble


@pytest.mark.parametrize("stubborn", ["sleep 60 & echo $!; wait", "trap '' TERM; echo $$; wait"])
def test_a_command_that_was_cut_off_is_killed_with_its_children(stubborn):
    answer = bounded.run(("/bin/sh", "-c", f"sleep 60 & {stubborn}"), os.environ, 0.3)
    assert ends(int(answer.out))


def alive_with(mark: str) -> list[str]:
    """Return the processes that have this in their environment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return found


def test_when_the_questions_are_over_no_command_lives_or_starts(tmp_path):
    """Whatever a thread was doing: some are between fork(2) and the entry in our list."""
    answers: list[bounded.Answer] = []

    def ask() -> None:
        answer = bounded.Answer("", "", 0, "")
        while "nobody waits" not in answer.trouble:
            answer = bounded.run(("sleep", "60"), {"MARK": str(tmp_path)}, 60)
        answers.append(answer)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(16)]
    with bounded.questions():
        for thread in threads:
            thread.start()
    end = time.monotonic() + 20
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert len(answers) == len(threads)
    assert alive_with(f"MARK={tmp_path}") == []
    assert bounded.run(("true",), os.environ, 10).trouble == ""  # the main thread is never refused


def test_a_grandchild_that_holds_the_output_open_is_not_waited_for():
    answer = bounded.run(("/bin/sh", "-c", "sleep 600 & echo $!; echo wrong >&2"), os.environ, 60)
    assert (answer.err, answer.status) == ("wrong\n", 0)
    assert proc.start(int(answer.out)) is not None
    os.kill(int(answer.out), signal.SIGKILL)


def test_a_python_that_cannot_make_memory_files_takes_others(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    answer = bounded.run(("/bin/sh", "-c", "echo out; echo err >&2"), os.environ, 60)
    assert answer[:3] == ("out\n", "err\n", 0)


@pytest.mark.parametrize("command", [("/no/such/program",), ("/tmp",), ("a\0b",)])
def test_a_program_that_cannot_be_started_is_an_answer(command):
    answer = bounded.run(command, os.environ, 1)
    assert (answer.status, "cannot be run" in answer.trouble) == (None, True)
