"""What our control group may use, in both versions of the interface and in a container."""

import pathlib
from typing import NamedTuple

import pytest

from saferun.system import cgroup

NO_LIMIT_V1 = str((1 << 63) - 4096)
V2 = {"g/cgroup.controllers": "cpu memory"}
JOB_V2 = {**V2, "p/self/cgroup": "0::/slurm/job_7\n"}
JOB_V1 = {"p/self/cgroup": "9:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n0::/x\n"}


class Machine(NamedTuple):
    """A directory that stands for a machine: `p` is its /proc, `g` its /sys/fs/cgroup."""

    root: pathlib.Path

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(cgroup, "PROC", str(tmp_path / "p"))
    monkeypatch.setattr(cgroup, "MOUNT", str(tmp_path / "g"))
    return Machine(tmp_path)


def test_a_machine_without_control_groups_limits_nothing(machine):
    assert cgroup.group("memory") == cgroup.Group()
    assert cgroup.memory() == cgroup.Memory()
    assert cgroup.memory_left() is None
    assert cgroup.cpu_quota() == 0
    assert cgroup.oom_kill_files() == ()


def used(folder: str, limit: str, amount: str) -> dict[str, str]:
    """The files of a group's memory, in version 2 and in version 1."""
    names = ("max", "current") if "/memory" not in folder else ("limit_in_bytes", "usage_in_bytes")
    return {f"{folder}/memory.{n}": text for n, text in zip(names, (limit, amount), strict=True)}


JOB, ABOVE, V1 = "g/slurm/job_7", "g/slurm", "g/memory/slurm/job_7"
MEMORY = {
    "no limit": ({**JOB_V2, **used(JOB, "max", "9")}, (-1, -1), None),
    "tighter above": (
        {**JOB_V2, **used(JOB, "900", "10"), **used(ABOVE, "500", "300")},
        (500, 300),
        200,
    ),
    "the looser is nearly used up": (
        {**JOB_V2, **used(JOB, "500", "10"), **used(ABOVE, "900", "880")},
        (500, 10),
        20,
    ),
    "version 1 over its limit": (
        {**JOB_V1, **used(V1, "700", "750"), **used("g/memory", NO_LIMIT_V1, "5")},
        (700, 750),
        0,
    ),
    "a container that sees only the mount": (
        {**V2, "p/self/cgroup": "0::/../../kubepods/pod_1\n", **used("g", "64", "4")},
        (64, 4),
        60,
    ),
    "usage not readable": ({**JOB_V2, "g/slurm/memory.max": "64"}, (64, -1), None),
}


@pytest.mark.parametrize(("files", "memory", "left"), MEMORY.values(), ids=MEMORY)
def test_the_tightest_limit_of_memory_counts(machine, files, memory, left):
    machine.write(files)
    assert cgroup.memory() == memory
    assert cgroup.memory_left() == left


CPU = {
    "no limit": ({**JOB_V2, "g/slurm/cpu.max": "max 100000"}, 0),
    "the tightest of two": (
        {**JOB_V2, f"{JOB}/cpu.max": "400000 100000", "g/slurm/cpu.max": "150000 100000"},
        1.5,
    ),
    "version 1": (
        {
            **JOB_V1,
            "g/cpu/slurm/cpu.cfs_quota_us": "400000",
            "g/cpu/slurm/cpu.cfs_period_us": "100000",
            "g/cpu/cpu.cfs_quota_us": "-1",
        },
        4,
    ),
}


@pytest.mark.parametrize(("files", "quota"), CPU.values(), ids=CPU)
def test_the_limit_of_cpu_time_is_a_number_of_cpus(machine, files, quota):
    machine.write(files)
    assert cgroup.cpu_quota() == quota


@pytest.mark.parametrize(
    ("files", "counter"),
    [(JOB_V2, "g/slurm/job_7/memory.events"), (JOB_V1, "g/memory/slurm/job_7/memory.oom_control")],
    ids=["version-2", "version-1"],
)
def test_kills_for_lack_of_memory_are_counted_by_the_group(machine, files, counter):
    machine.write({**files, counter: "oom 1\noom_kill 3\n"})
    found = cgroup.oom_kill_files()
    assert cgroup.oom_kills(found[0]) == 3


def test_a_counter_that_is_not_there_or_not_a_number_is_unknown(machine):
    machine.write({"p/vmstat": "nr_free_pages 5\noom_kill many\n"})
    assert cgroup.oom_kills(f"{machine.root}/p/vmstat") is None
    assert cgroup.oom_kills(f"{machine.root}/nothing") is None
    assert cgroup.oom_kills(str(machine.root)) is None
