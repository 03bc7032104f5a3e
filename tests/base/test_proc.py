"""What /proc says of a process: living, dead, gone or another user's."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rights import STRANGER, needs
from users import acting_as

from saferun.base import proc

NOTHING = (b"", {}, [], {}, "")


def private(pid: int) -> tuple[object, ...]:
    """What only the process's user may read."""
    own = (proc.environ_data(pid), proc.environ(pid), proc.command(pid))
    return (*own, proc.descriptors(pid), proc.namespace(pid, "pid"))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that lives until its stdin closes, with RANK=3."""
    words = (sys.executable, "-c", "print(flush=True); input()", "two words")
    env = {"RANK": "3", "ODD": "=\udcff=", "EMPTY": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=env, text=True, **pipes) as process:
        process.stdout.readline()
        yield process
        process.kill()


def dead(process: subprocess.Popen[str]) -> None:
    """Kill a process, and leave it a zombie."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_living_process_is_read(child):
    data, variables, words, files, namespace = private(child.pid)
    assert (b"RANK=3\0" in data, words[-1]) == (True, "two words")
    assert variables == {"RANK": "3", "ODD": "=\udcff=", "EMPTY": ""}
    assert files[0] == os.readlink(f"/proc/{child.pid}/fd/0")
    assert namespace == os.readlink("/proc/self/ns/pid")
    assert proc.stat(child.pid)[1] == str(os.getpid())
    assert proc.start(child.pid) == int(proc.stat(child.pid)[19])
    assert child.pid in proc.pids()


def test_a_zombie_is_dead_and_says_nothing_more(child):
    dead(child)
    assert private(child.pid)[:4] == NOTHING[:4]
    assert proc.stat(child.pid)[0] == "Z"
    assert proc.start(child.pid) is None


def test_a_process_that_is_gone_says_nothing(child):
    dead(child)
    child.wait()
    assert private(child.pid) == NOTHING
    assert (proc.stat(child.pid), proc.start(child.pid)) == (None, None)


@needs("become others")
@pytest.mark.parametrize("zombie", [False, True])
def test_another_users_process_says_nothing_private(child, zombie):
    """The kernel refuses it: EACCES, also of a zombie of one's own."""
    start = proc.start(child.pid)
    if zombie:
        dead(child)
    with acting_as(STRANGER):
        found, seen = private(child.pid), proc.start(child.pid)
    assert found[0] == b""
    assert (found[1], found[3:]) == ({}, NOTHING[3:])
    assert seen == (None if zombie else start)


def test_variables_that_are_cut_are_unknown(child):
    size = len(proc.environ_data(child.pid))
    assert proc.environ(child.pid, size - 1) == {}
    assert proc.environ(child.pid, size) == proc.environ(child.pid) != {}


def test_a_file_is_read_up_to_a_limit(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(bytes(1 << 18))
    assert [len(proc.data(str(path), most)) for most in (0, 7, 1 << 17, 1 << 20)] == [
        *(0, 7, 1 << 17, 1 << 18)
    ]
    assert proc.data(str(tmp_path)) == proc.data(str(tmp_path / "none")) == b""
    assert (proc.names(str(tmp_path)), proc.names(str(path))) == (["long"], [])


def test_only_open_descriptors_are_listed():
    found = proc.descriptors("self")
    assert all(os.fstat(number) for number in found)
