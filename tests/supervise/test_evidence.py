"""What is known of an attempt from sources other than its output."""

import subprocess
import sys

import pytest
from control_groups import small_group

from saferun.diagnosis.reading import log_reader
from saferun.supervise import rank_processes
from saferun.supervise.attempt import evidence


def test_the_disk_is_looked_at_where_a_file_could_not_be_opened():
    for path, ample in (("/proc/a.pt", False), ("/no/such/folder/a.pt", None)):
        log = log_reader.of_text(f"RuntimeError: File {path} cannot be opened.\n")
        assert evidence._disk_is_ample(log) is ample


EATS = """
import sys
group, = sys.argv[1:]
open(group + "/cgroup.procs", "w").write("0")
print("there", flush=True)
sys.stdin.readline()
eaten = bytearray(b"x") * (1 << 30)
"""


@pytest.mark.parametrize(
    ("seen", "count"), [(True, 1), (False, None)], ids=["its group is read", "it is not"]
)
def test_a_kill_in_the_ranks_own_group_is_counted_there(seen, count):
    kills = evidence.OutOfMemoryKills()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with small_group(32 << 20) as group:
        with subprocess.Popen([sys.executable, "-c", EATS, str(group)], **pipes) as rank:
            assert rank.stdout.readline() == b"there\n"
            if seen:
                kills.see([rank.pid])
            rank.stdin.close()
        assert rank.returncode == -9
        assert kills.since() == count


def test_no_kill_is_reported_where_the_machine_counted_none(tmp_path, monkeypatch):
    machine = tmp_path / "vmstat"
    machine.write_text("oom_kill 7\n", encoding="utf-8")
    monkeypatch.setattr(evidence, "_MACHINE", str(machine))
    assert evidence.OutOfMemoryKills().since() == 0


LAUNCHER = """
import os, subprocess, sys
flags = sys.argv[1:]
code = "import sys; print('up', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, *flags, "-c", code], env={**os.environ, "RANK": "0"})
child.wait()
"""


@pytest.mark.parametrize(
    ("flags", "isolated"),
    [(["-u"], False), (["-I"], True), (["-uE"], True), (["-S"], True)],
    ids=["unbuffered", "isolated", "no environment", "no site"],
)
def test_ranks_that_skip_the_hooks_are_known_by_their_command_line(flags, isolated):
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout.readline() == b"up\n"
        seen = rank_processes.ranks(launcher.pid)
        found = [rank_processes.is_isolated(pid) for pid in seen.values()]
        launcher.stdin.close()
    assert (list(seen), found) == ([0], [isolated])
