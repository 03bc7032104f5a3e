"""What is known of an attempt from sources other than its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.diagnosis import log_reader
from saferun.supervise import evidence

REPORT = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "time_s": 5}}}


def write_error_file(folder: Path, name: str, content: str | None = None) -> None:
    path = folder / name
    path.write_text(json.dumps(REPORT) if content is None else content)


def test_error_files_are_read_those_of_the_last_restart_only(tmp_path):
    write_error_file(tmp_path, "a1-r0-rank0-pid10.error.json")
    write_error_file(tmp_path, "a2-r0-rank0-pid20.error.json")
    write_error_file(tmp_path, "a2-r1-rank1-pid21.error.json")
    found = evidence.failures(str(tmp_path), 2)
    assert [(f.rank, f.time_s, f.message) for f in found] == [(1, 5.0, "ValueError: x")]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 3}'])
def test_a_broken_error_file_is_a_rank_without_a_message(tmp_path, content):
    write_error_file(tmp_path, "a1-r0-rank4-pid1.error.json", content)
    (found,) = evidence.failures(str(tmp_path), 1)
    assert (found.rank, found.traceback) == (4, "")


@pytest.mark.parametrize("directory", [None, "/nowhere"])
def test_without_a_directory_there_are_no_error_files(directory):
    assert evidence.failures(directory, 1) == ()


def test_a_planted_link_is_not_read(tmp_path):
    (tmp_path / "secret").write_text(json.dumps(REPORT))
    os.symlink(tmp_path / "secret", tmp_path / "a1-r0-rank0-pid1.error.json")
    (found,) = evidence.failures(str(tmp_path), 1)
    assert found.message == ""


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
