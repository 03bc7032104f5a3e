"""What is known of an attempt from sources other than its output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from saferun.diagnosis import log_reader
from saferun.supervise import evidence


@pytest.mark.parametrize(
    ("path", "ample"),
    [("/proc/a.pt", False), ("/no/such/folder/a.pt", None)],
    ids=["no room", "gone"],
)
def test_the_disk_is_looked_at_where_a_file_could_not_be_opened(path, ample):
    log = log_reader.of_text(f"RuntimeError: File {path} cannot be opened.\n")
    assert evidence._disk_is_ample(log) is ample


def test_the_disk_is_not_looked_at_without_such_a_file():
    assert evidence._disk_is_ample(log_reader.of_text("KeyError: 1\n")) is None


def test_kills_for_lack_of_memory_are_counted_from_a_moment_on():
    kills = evidence.OutOfMemoryKills()
    assert kills.since() in (0, None)


def test_the_growth_of_the_kernels_counter_is_the_number_of_kills(tmp_path, monkeypatch):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 3\n")
    monkeypatch.setattr(evidence.cgroup, "oom_kill_files", lambda: (str(counter),))
    kills = evidence.OutOfMemoryKills()
    counter.write_text("low 0\noom 4\noom_kill 5\n")
    assert kills.since() == 2


LAUNCHER = """
import os, subprocess, sys
flags = sys.argv[1:]
code = "import sys; print('up', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, *flags, "-c", code], env={**os.environ, "RANK": "0"})
child.wait()
"""


@pytest.mark.parametrize(
    ("flags", "isolated"),
    [([], False), (["-u"], False), (["-I"], True), (["-uE"], True), (["-S"], True)],
    ids=["plain", "unbuffered", "isolated", "no environment", "no site"],
)
def test_ranks_that_skip_the_hooks_are_known_by_their_command_line(flags, isolated):
    environ = {k: v for k, v in os.environ.items() if k != "RANK"}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *flags],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout.readline() == b"up\n"
        seen = evidence.ranks(launcher.pid)
        launcher.stdin.close()
    assert seen == evidence.Ranks(True, isolated)


def test_a_process_without_ranks_has_none():
    assert evidence.ranks(os.getpid()) == evidence.Ranks()
    assert evidence.ranks(2**22 + 1) == evidence.Ranks()
