"""What is known of an attempt from outside its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from saferun.supervise import evidence

REPORT = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "time_s": 5}}}


def report(folder, name, content=None):
    path = folder / name
    path.write_text(json.dumps(REPORT) if content is None else content)


def test_the_exceptions_that_ranks_wrote_down_are_read_those_of_the_last_restart_only(tmp_path):
    report(tmp_path, "a1-r0-rank0-pid10.error.json")
    report(tmp_path, "a2-r0-rank0-pid20.error.json")
    report(tmp_path, "a2-r1-rank1-pid21.error.json")
    found = evidence.failures(str(tmp_path), 2)
    assert [(f.rank, f.time_s, f.message) for f in found] == [(1, 5.0, "ValueError: x")]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 3}'])
def test_a_broken_report_is_a_rank_without_a_message(tmp_path, content):
    report(tmp_path, "a1-r0-rank4-pid1.error.json", content)
    (found,) = evidence.failures(str(tmp_path), 1)
    assert (found.rank, found.traceback) == (4, "")


@pytest.mark.parametrize("directory", [None, "/nowhere"])
def test_no_directory_is_no_report(directory):
    assert evidence.failures(directory, 1) == ()


def test_a_planted_link_is_not_read(tmp_path):
    (tmp_path / "secret").write_text(json.dumps(REPORT))
    os.symlink(tmp_path / "secret", tmp_path / "a1-r0-rank0-pid1.error.json")
    (found,) = evidence.failures(str(tmp_path), 1)
    assert found.message == ""


def test_the_kernels_kills_for_want_of_memory_are_counted_from_a_moment_on():
    kills = evidence.OutOfMemoryKills()
    assert kills.since() in (0, None)


def test_a_counter_that_grows_is_seen(tmp_path, monkeypatch):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 3\n")
    monkeypatch.setattr(evidence, "_group_counters", lambda: [str(counter)])
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
