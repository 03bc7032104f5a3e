"""Disks, memory, limits, clock, compilers and the scheduler: what doctor reads and makes of it."""

from __future__ import annotations

import json
import os
import pathlib
import threading
import time

import pytest
from cases import with_limits
from runs import executable

from saferun.doctor.checks import checks_host
from saferun.doctor.collect import host
from saferun.doctor.vitals import Clock, Disk, Limits, Memory, Tools, Torch
from saferun.model import NOTE, OK, PROBLEM, Gpu, GpuFacts
from saferun.system import gpus as gpu
from saferun.system import kernellog

GIB = 1 << 30


def levels(found):
    return [finding.level for finding in found]


# disks


def disk(**changed):
    room = {"free": 500 * GIB, "total": 900 * GIB, "inodes_free": 10**6, "inodes": 10**7}
    return Disk("compile cache", "/c", "/c", **{**room, **changed})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (disk(), [OK]),
        (disk(free=5 * GIB), [NOTE]),
        (disk(free=GIB // 2), [PROBLEM]),
        (disk(inodes_free=3), [PROBLEM]),
        (disk(inodes_free=0, inodes=0), [OK]),
        (disk(noexec=True), [PROBLEM]),
        (disk(noexec=True)._replace(role="working directory"), [OK]),
        (disk(trouble="Read-only file system"), [PROBLEM]),
        (disk(free=-1, total=-1), []),
    ],
    ids=["roomy", "small", "full", "inodes", "no inodes", "noexec", "data", "read-only", "unknown"],
)
def test_a_directory_must_have_free_space_and_be_writable(found, expected):
    assert levels(checks_host.disks([found])) == expected


def test_the_fix_of_a_full_disk_names_the_variable_to_export():
    (found,) = checks_host.disks([disk(trouble="No space left on device")])
    assert "TORCHINDUCTOR_CACHE_DIR" in found.fix


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("TMPDIR", "temporary files"),
        ("TORCHINDUCTOR_CACHE_DIR", "compile cache"),
        ("TRITON_CACHE_DIR", "Triton's cache"),
        ("HF_HOME", "models and data sets"),
    ],
)
def test_the_directories_are_those_that_a_job_would_use(tmp_path, name, role):
    given = host.directories({"HOME": "/home/u", name: str(tmp_path)}, "/work")
    assert given[role] == str(tmp_path)
    assert given["working directory"] == "/work"
    assert host.directories({"HOME": "/home/u"}, "/work")[role] != str(tmp_path)


def test_a_missing_directory_is_judged_by_the_one_above_it(tmp_path):
    seen = host.disk("compile cache", str(tmp_path / "a" / "b"))
    assert (seen.place, seen.trouble) == (str(tmp_path), "")
    assert seen.free > 0


def test_a_directory_that_cannot_be_written_says_why():
    seen = host.disk("compile cache", "/proc/self/cache")
    assert seen.trouble
    assert levels(checks_host.disks([seen])) == [PROBLEM]


def test_a_file_in_the_place_of_a_directory_is_a_problem(tmp_path):
    (tmp_path / "cache").write_text("")
    assert host.disk("compile cache", str(tmp_path / "cache")).trouble == "it is not a directory"


def test_the_check_of_a_directory_leaves_no_file(tmp_path):
    host.disk("working directory", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_hangs_is_named_and_the_others_answer(tmp_path, monkeypatch):
    release = threading.Event()
    real = host.disk

    def sometimes(role, path):
        if role == "dead":
            release.wait(300)
        return real(role, path)

    monkeypatch.setattr(host, "disk", sometimes)
    try:
        places = {"dead": "/mnt/nfs", "alive": str(tmp_path)}
        dead, _ = with_limits(lambda s: host.disks(places, s), lambda found: not found[1].trouble)
    finally:
        release.set()
    assert "does not answer" in dead.trouble


# memory and processors


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [(64 << 20, 64 << 20, PROBLEM), (8 * GIB, 8 * GIB, OK), (8 * GIB, 1 << 20, PROBLEM)],
    ids=["docker's", "ample", "full"],
)
def test_shared_memory_must_have_space_for_batches(total, free, expected):
    found = checks_host.shared_memory(Memory(shm_total=total, shm_free=free))
    assert levels(found) == [expected]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (Memory(total=64 * GIB, available=60 * GIB), OK),
        (Memory(total=64 * GIB, available=2 * GIB), NOTE),
        (Memory(total=64 * GIB, available=60 * GIB, limit=8 * GIB, used=GIB), OK),
        (Memory(total=64 * GIB, available=60 * GIB, limit=8 * GIB, used=8 * GIB), PROBLEM),
    ],
    ids=["ample", "low", "limit", "limit reached"],
)
def test_available_memory_is_bounded_by_machine_and_limit(known, expected):
    assert levels(checks_host.memory(known)) == [expected]


@pytest.mark.parametrize(
    ("known", "gpus", "expected"),
    [
        (Memory(cpus=64), 8, OK),
        (Memory(cpus=64, quota=4.0), 0, NOTE),
        (Memory(cpus=8), 8, NOTE),
        (Memory(cpus=2), 0, OK),
    ],
    ids=["enough", "quota", "few for the GPUs", "no GPU"],
)
def test_cpu_time_is_compared_with_the_gpus(known, gpus, expected):
    assert levels(checks_host.processors(known, gpus)) == [expected]


def test_memory_is_read_with_the_limits_of_the_control_group(tmp_path: pathlib.Path) -> None:
    files = {
        "p/meminfo": "MemTotal: 8 kB\n",
        "p/self/cgroup": "0::/job\n",
        "g/cgroup.controllers": "cpu memory",
        "g/job/memory.max": "4096",
        "g/job/memory.current": "9",
        "g/job/cpu.max": "150000 100000",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen = host.memory(str(tmp_path / "p"), str(tmp_path / "g"))
    assert (seen.limit, seen.used, seen.quota, seen.total) == (4096, 9, 1.5, 8192)


# limits and clock


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (Limits(files=65536), [OK]),
        (Limits(files=-1), [OK]),
        (Limits(files=1024, files_hard=524288), [NOTE]),
        (Limits(files=256), [PROBLEM]),
        (Limits(files=65536, processes=512), [OK, NOTE]),
    ],
    ids=["many", "no limit", "the usual", "few", "few processes"],
)
def test_limits_are_compared_with_what_a_job_opens(known, expected):
    assert levels(checks_host.limits(known)) == expected


def test_the_fix_of_a_limit_is_its_hard_one():
    (found,) = checks_host.limits(Limits(files=1024, files_hard=524288))
    assert "ulimit -n 524288" in found.fix


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (Clock(2026, True), [OK]),
        (Clock(2026, False), [NOTE]),
        (Clock(1970, True), [PROBLEM]),
        (Clock(2026, None), []),
    ],
    ids=["right", "unkept", "1970", "unknown"],
)
def test_the_clock_must_be_right(known, expected):
    assert levels(checks_host.clock(known)) == expected


def test_this_machines_clock_and_limits_are_read():
    assert host.clock().year >= 2024
    assert host.limits().files != 0


# compilers


TRITON = Torch("torchrun", python="3.11", cuda="12.8", triton="3.5.1", ptxas="/t/ptxas")


@pytest.mark.parametrize(
    ("tools", "torch", "environ", "gpus", "expected"),
    [
        (Tools("/usr/bin/gcc", "/usr/bin/g++"), TRITON, {}, True, [OK]),
        (Tools(), TRITON, {}, True, [NOTE]),
        (Tools(), TRITON, {"CC": "icc"}, True, [PROBLEM]),
        (Tools(cc="gcc"), TRITON._replace(python_h=False), {}, True, [NOTE]),
        (Tools(cc="gcc"), TRITON._replace(triton=None), {}, True, [NOTE]),
        (Tools(cc="gcc"), TRITON._replace(ptxas=None), {}, True, [NOTE]),
        (Tools(cc="gcc", ptxas="/p"), TRITON._replace(ptxas=None), {}, True, [OK]),
        (Tools(cc="gcc"), TRITON, {"TRITON_PTXAS_PATH": "/no"}, True, [PROBLEM, OK]),
        (Tools(), Torch(python="3.11"), {}, False, [NOTE]),
        (Tools(cxx="g++"), Torch(python="3.11", python_h=False), {}, False, [OK]),
    ],
    ids=[
        "all",
        "no C compiler",
        "CC that is not there",
        "no Python.h",
        "no Triton",
        "no ptxas",
        "the toolkit's ptxas",
        "a path to nothing",
        "no C++ on a CPU",
        "CPU",
    ],
)
def test_the_compilers_of_torch_compile_must_be_there(tools, torch, environ, gpus, expected):
    assert levels(checks_host.compilers(tools, torch, environ, gpus)) == expected


def test_compilers_are_searched_for_as_triton_and_inductor_do(tmp_path):
    for name in ("clang", "g++", "mycc"):
        executable(tmp_path / name, "")
    path = {"PATH": str(tmp_path)}
    assert host.tools(path) == Tools(str(tmp_path / "clang"), str(tmp_path / "g++"), "")
    assert host.tools({**path, "CC": "mycc -O2"}).cc == str(tmp_path / "mycc")
    assert host.tools({**path, "CC": "icc"}).cc == ""


# the scheduler

TWO = GpuFacts((Gpu(0, "GPU-a", "H200"), Gpu(1, "GPU-b", "H200")), "proc")
NONE = GpuFacts()


def seen(visible):
    """What is found with this CUDA_VISIBLE_DEVICES where the GPUs differ."""
    mixed = gpu.Machine((Gpu(0, "GPU-a", "H200"), Gpu(1, "GPU-b", "L4")))
    gpus, remark = gpu.visible(mixed, visible)
    return GpuFacts(gpus, "proc", remark)


@pytest.mark.parametrize(
    ("environ", "facts", "expected"),
    [
        ({}, TWO, []),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}, TWO, [OK]),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, TWO, [OK, NOTE]),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, TWO, [OK]),
        ({"PBS_JOBID": "8"}, TWO, [OK]),
        ({"LSB_JOBID": "9"}, TWO, [OK]),
        ({"RAY_JOB_ID": "1"}, TWO, [OK]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, TWO, [OK]),
        ({"CUDA_VISIBLE_DEVICES": ""}, NONE, [NOTE]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, NONE, [NOTE]),
        (
            {"CUDA_VISIBLE_DEVICES": "5"},
            seen("5"),
            [PROBLEM],
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "0,5"},
            seen("0,5"),
            [PROBLEM],
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "0"},
            seen("0"),
            [NOTE],
        ),
        ({}, TWO._replace(warning="nvidia-smi -L: exit status 15"), [NOTE]),
        ({}, GpuFacts(warning="nvidia-smi -L: it printed nothing"), [PROBLEM]),
        (
            {"CUDA_VISIBLE_DEVICES": "0"},
            GpuFacts(warning="nvidia-smi -L: it printed nothing"),
            [PROBLEM],
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS_PER_NODE": "8",
            },
            TWO,
            [NOTE],
        ),
    ],
)
def test_what_a_scheduler_allocated_is_compared_with_what_is_here(environ, facts, expected):
    assert levels(checks_host.scheduler(environ, facts, 2)) == expected


# the kernel log


def test_the_kernel_log_is_read_record_by_record(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("4,1,5,-;usb: hello\n4,2,6,-;NVRM: Xid (PCI:0000:c1:00): 79, pid=1\n")
    read = kernellog.read({}, str(log))
    assert read.lines == ("4,2,6,-;NVRM: Xid (PCI:0000:c1:00): 79, pid=1",)
    assert read.source == str(log)


KILLED = "Memory cgroup stats for /NVRM: Xid (PCI:0000:c1:00): 79, gone:"


@pytest.mark.parametrize("line", [KILLED, f"6,532,4930911001,-;{KILLED}", f"6,5,4,-; x;{KILLED}"])
def test_a_user_s_name_of_a_control_group_is_no_word_of_the_driver(tmp_path, line):
    """The kernel prints it where it kills what is in the group for lack of memory."""
    log = tmp_path / "kmsg"
    log.write_text(f"{line}\n")
    assert kernellog.read({}, str(log)) == kernellog.Log((), str(log))


def test_journald_is_asked_where_the_log_may_not_be_read(tmp_path):
    xid = "NVRM: Xid (PCI:0000:c1:00): 31, pid=1"
    messages = [xid, "other", list(xid.encode()), None]
    read = journald_says(tmp_path, *({"MESSAGE": one} for one in messages))
    assert (read.source, read.lines) == ("journalctl", (xid, xid))


def journald_says(tmp_path, *entries: object, ascii: bool = True) -> kernellog.Log:
    lines = "".join(json.dumps(entry, ensure_ascii=ascii) + "\n" for entry in entries)
    (tmp_path / "log").write_text(lines)
    asked = 'case "$*" in *--output=json*) ;; *) exit 1 ;; esac'
    text = f"#!/bin/sh\n{asked}\nexec /bin/cat '{tmp_path}/log'\n"
    executable(tmp_path / "journalctl", text)
    return kernellog.read({"PATH": str(tmp_path)}, str(tmp_path / "none"))


XID = "NVRM: Xid (PCI:0000:c1:00): 79, gone"


@pytest.mark.parametrize(
    "message",
    [
        f"traps: \n{XID}[12] trap int3",
        list(f"\n{XID}[12]: segfault at 0".encode()),
        f"\r{XID}[12]: segfault",
        f"cgroup /\u2028{XID}",
        f'cgroup /\u2028{{"MESSAGE": "{XID}"}}\u2028',
        "NVRM: Xid 79[12]: segfault at 0",
    ],
)
@pytest.mark.parametrize("ascii", [True, False])
def test_a_programs_name_writes_no_line_of_the_driver(tmp_path, message, ascii):
    """journald takes back what the kernel has escaped."""
    read = journald_says(tmp_path, {"MESSAGE": message}, ascii=ascii)
    assert (read.source, read.lines) == ("journalctl", ())


@pytest.mark.parametrize("text", [None, "exit 1", "true"], ids=["none", "fails", "says nothing"])
def test_a_log_that_nobody_may_read_has_a_reason(tmp_path, text):
    if text:
        executable(tmp_path / "journalctl", f"#!/bin/sh\n{text}\n")
    read = kernellog.read({"PATH": str(tmp_path)}, str(tmp_path / "none"))
    assert (read.source, read.trouble != "") == ("", True)


def test_this_machines_log_is_read_or_refused():
    read = kernellog.read(os.environ)
    assert read.source or read.trouble
    assert pathlib.Path("/dev/kmsg").exists() or read.source != "/dev/kmsg"


def test_only_the_kernels_records_since_a_moment_are_read(tmp_path):
    log = tmp_path / "kmsg"
    now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    log.write_text(f"4,1,5,-;NVRM: old\n4,2,{now_us},-;NVRM: new\nNVRM: continued\n")
    read = kernellog.read({}, str(log), since_s=time.time() - 60)
    assert read.lines == (f"4,2,{now_us},-;NVRM: new",)


def test_journald_is_asked_since_a_moment(tmp_path):
    text = '#!/bin/sh\necho "{\\"MESSAGE\\":\\"NVRM: $*\\"}"\n'
    executable(tmp_path / "journalctl", text)
    read = kernellog.read({"PATH": str(tmp_path)}, str(tmp_path / "none"), since_s=1700000000.5)
    assert read.lines[0].endswith("--since=@1700000000")


# NUMA


TWO = {"0000:18:00.0": 0, "0000:ad:00.0": 1}
NUMBERS = {"0000:18:00.0": 0, "0000:ad:00.0": 1}


@pytest.mark.parametrize(
    ("gpus", "nodes", "areas"),
    [
        (TWO, {0: 8, 1: 8}, ["NUMA"]),
        (TWO, {0: 8, 1: 0}, ["GPU 1"]),
        (TWO, {0: 16}, []),
        ({}, {0: 8, 1: 8}, []),
        ({"0000:18:00.0": 0}, {0: 8, 1: 0}, []),
    ],
    ids=["unbound", "the other node is not allowed", "one node", "no GPU", "bound to its node"],
)
def test_ranks_are_to_run_on_the_node_of_their_gpu(gpus, nodes, areas):
    found = list(checks_host.numa(gpus, nodes, NUMBERS))
    assert [finding.area for finding in found] == areas
    assert all(finding.level == NOTE for finding in found)


def test_the_nodes_are_read_as_the_kernel_has_them(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    for node, cpus in (
        ("node0", f"{allowed[0]}\n"),
        ("node1", "9000-9003,9008\n"),
        ("node2", "\n"),
    ):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    (tmp_path / "possible").write_text("0-2\n")
    assert host.numa(str(tmp_path)) == {0: 1, 1: 0}
    assert host.numa(str(tmp_path / "none")) == {}
