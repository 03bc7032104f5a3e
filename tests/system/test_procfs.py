"""A record's process lives, is gone, or cannot be judged from here; a pid alone proves nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from saferun.system import procfs

TELL = (
    "import json; from saferun.system.procfs import this_process; print(json.dumps(this_process()))"
)


@pytest.fixture
def other():
    """Another process's record, and the process, which lives until its stdin closes."""
    code = f"{TELL[:-1]}, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield json.loads(process.stdout.readline()), process
        process.kill()


def test_a_process_that_lives_is_known_to_live(other):
    assert procfs.lives(other[0]) is True


def test_a_process_that_ended_is_known_to_be_gone(other):
    told, process = other
    process.kill()
    process.wait()
    assert procfs.lives(told) is False


def test_a_zombie_does_not_live(other):
    told, process = other
    process.kill()
    with open(f"/proc/{process.pid}/stat") as stat:
        while stat.read().rpartition(")")[2].split()[0] != "Z":
            stat.seek(0)
    assert procfs.lives(told) is False


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({"start": 1}, False),
        ({"boot": "another"}, False),
        ({"boot": "another", "host": "elsewhere"}, None),
        ({"pids": "pid:[1]"}, None),
    ],
    ids=["a pid given away again", "before a reboot", "another machine", "another container"],
)
def test_the_pid_of_a_living_process_is_not_enough(change, lives):
    assert procfs.lives({**procfs.this_process(), **change}) is lives


@pytest.mark.parametrize(
    "change",
    [{"pid": None}, {"pid": "1"}, {"pid": True}, {"start": None}, {"start": 1.5}, {"boot": ""}],
    ids=str,
)
def test_a_record_that_is_garbage_tells_nothing(change):
    assert procfs.lives({**procfs.this_process(), **change}) is None
    assert procfs.lives({}) is None


@pytest.mark.parametrize("pid", [0, -1, 1 << 70], ids=str)
def test_a_pid_that_cannot_be_is_no_process(pid):
    assert procfs.lives({**procfs.this_process(), "pid": pid}) is False
