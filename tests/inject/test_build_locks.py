"""The lock of a C++ extension's build goes with its owner, also where that was killed."""

from __future__ import annotations

import os

import pytest
from interpreters import Interpreters

# What torch.utils.cpp_extension does around a build.
ACQUIRE = """
import os, signal, sys
from torch.utils.file_baton import FileBaton
baton = FileBaton("lock")
taken = baton.try_acquire()
print(taken, flush=True)
if taken and "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if taken and "child" in sys.argv:
    os.system(f"{sys.executable} {sys.argv[0]}")
if taken:
    baton.release()
"""


@pytest.fixture
def script(interpreters: Interpreters) -> str:
    path = interpreters.folder / "build.py"
    path.write_text(ACQUIRE)
    return str(path)


def test_the_lock_of_a_killed_process_is_taken_and_then_released(
    interpreters: Interpreters, script: str
) -> None:
    lock = interpreters.folder / "lock"
    assert interpreters.run(argv=(script, "die"), hooks={}).code == -9
    assert lock.exists()
    ran = interpreters.run(argv=(script,), hooks={})
    assert (ran.out, ran.err) == ("True\n", "")
    assert not lock.exists()


def test_a_lock_whose_owner_lives_is_kept(interpreters: Interpreters, script: str) -> None:
    ran = interpreters.run(argv=(script, "child"), hooks={})
    assert (ran.out, ran.err) == ("True\nFalse\n", "")


@pytest.mark.parametrize("content", ["", "saferun other-boot pid:[1] pid 1 5", "pid 999999 "])
def test_a_lock_of_nobody_known_is_kept(
    interpreters: Interpreters, script: str, content: str
) -> None:
    lock = interpreters.folder / "lock"
    lock.write_text(content)
    assert interpreters.run(argv=(script,), hooks={}).out == "False\n"
    assert lock.read_text() == content


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_a_lock_of_another_user_is_kept(interpreters: Interpreters, script: str) -> None:
    assert interpreters.run(argv=(script, "die"), hooks={}).code == -9
    os.chown(interpreters.folder / "lock", 65534, 65534)
    assert interpreters.run(argv=(script,), hooks={}).out == "False\n"
