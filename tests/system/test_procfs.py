"""Whether the process of a record lives, is gone, or cannot be judged from here."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from saferun.system import procfs

PRINT_THIS_PROCESS = (
    "import json; from saferun.system.procfs import this_process; print(json.dumps(this_process()))"
)


@pytest.fixture
def other() -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """Another process's record, and the process, which lives until its stdin closes."""
    code = f"{PRINT_THIS_PROCESS[:-1]}, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield json.loads(process.stdout.readline()), process
        process.kill()


def test_a_process_whose_clock_is_shifted_is_not_taken_for_gone():
    """In a time namespace /proc shows other start times, and those outside it in turn."""
    code = f"{PRINT_THIS_PROCESS[:-1]}, flush=True); input()"
    command = ["unshare", "--time", "--boottime", "100000", "--fork", sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        line = process.stdout.readline()
        if not line:
            pytest.skip("no time namespace can be made here")
        assert procfs.lives(json.loads(line)) is None
        process.communicate(b"\n")


def test_a_process_lives_until_it_is_a_zombie_or_gone(other):
    record, process = other
    assert procfs.lives(record) is True
    process.kill()
    with open(f"/proc/{process.pid}/stat", encoding="utf-8") as stat:
        while stat.read().rpartition(")")[2].split()[0] != "Z":
            stat.seek(0)
    assert procfs.lives(record) is False
    process.wait()
    assert procfs.lives(record) is False


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({"start": 1}, False),
        ({"boot": "another"}, False),
        ({"boot": "another", "host": "elsewhere"}, None),
        ({"pids": "pid:[1]"}, None),
        ({"pid": 0}, False),
        ({"pid": 1 << 70}, False),
    ],
    ids=str,
)
def test_the_pid_of_a_living_process_is_not_enough(change, lives):
    assert procfs.lives({**procfs.this_process(), **change}) is lives


@pytest.mark.parametrize(
    "change",
    [{"pid": None}, {"pid": "1"}, {"pid": True}, {"start": None}, {"start": 1.5}, {"boot": ""}],
    ids=str,
)
def test_a_corrupt_record_proves_nothing(change):
    assert procfs.lives({**procfs.this_process(), **change}) is None
    assert procfs.lives({}) is None
