"""Disks, memory, limits, clock, compilers and the scheduler: what doctor reads and makes of it."""

import json
import os
import pathlib
import threading
import time
from dataclasses import replace

import pytest
from cases import check_cases, with_limits
from sandbox import executable, shell

from saferun.doctor.checks import checks_host
from saferun.doctor.collect import host
from saferun.doctor.vitals import Clock, Disk, Limits, Memory, Tools, Torch
from saferun.model import NOTE, OK, PROBLEM, Gpu, GpuFacts
from saferun.system import cgroup, kernellog
from saferun.system import gpus as gpu

GIB = 1 << 30


def levels(found):
    return [finding.level for finding in found]


def disk(role="compile cache", **changed):
    room = {"free": 500 * GIB, "total": 900 * GIB, "inodes_free": 10**6, "inodes": 10**7}
    return checks_host.disks([Disk(role, "/c", "/c", **{**room, **changed})])


def shm(total, free):
    return checks_host.shared_memory(Memory(shm_total=total, shm_free=free))


def memory(available, limit=-1, used=-1):
    known = Memory(total=64 * GIB, available=available * GIB, limit=limit * GIB, used=used * GIB)
    return checks_host.memory(known)


def cpus(gpus, cpus, quota=0.0):
    return checks_host.processors(Memory(cpus=cpus, quota=quota), gpus)


def limits(files, **more):
    return checks_host.limits(Limits(files, **more))


def clock(year, synchronised):
    return checks_host.clock(Clock(year, synchronised))


CPU = Torch("torchrun", python="3.11")
TRITON = replace(CPU, cuda="12.8", triton="3.5.1", ptxas="/t/ptxas")


def compilers(tools, torch=TRITON, **environ):
    return checks_host.compilers(tools, torch, environ, torch.cuda is not None)


HERE = GpuFacts((Gpu(0, "GPU-a", "H200"), Gpu(1, "GPU-b", "H200")), "proc")
SILENT = GpuFacts(warning="nvidia-smi -L: it printed nothing")
TASKS = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "8"}


def scheduler(facts=HERE, **environ):
    return checks_host.scheduler(environ, facts, 2)


def visible(wanted):
    """Judge this CUDA_VISIBLE_DEVICES where the GPUs differ."""
    mixed = gpu.Machine((Gpu(0, "GPU-a", "H200"), Gpu(1, "GPU-b", "L4")))
    gpus, remark = gpu.visible(mixed, wanted)
    return scheduler(GpuFacts(gpus, "proc", remark), CUDA_VISIBLE_DEVICES=wanted)


JUDGED = {
    "a disk": (disk(), [OK]),
    "a small disk": (disk(free=5 * GIB), [NOTE]),
    "a full disk": (disk(free=GIB // 2), [PROBLEM]),
    "few inodes": (disk(inodes_free=3), [PROBLEM]),
    "no inodes": (disk(inodes_free=0, inodes=0), [OK]),
    "a cache that is mounted noexec": (disk(noexec=True), [PROBLEM]),
    "data that are mounted noexec": (disk("working directory", noexec=True), [OK]),
    "a read-only disk": (disk(trouble="Read-only file system"), [PROBLEM]),
    "an unknown disk": (disk(free=-1, total=-1), []),
    "docker's shared memory": (shm(64 << 20, 64 << 20), [PROBLEM]),
    "shared memory": (shm(8 * GIB, 8 * GIB), [OK]),
    "full shared memory": (shm(8 * GIB, 1 << 20), [PROBLEM]),
    "memory": (memory(60), [OK]),
    "little memory": (memory(2), [NOTE]),
    "memory within a limit": (memory(60, limit=8, used=1), [OK]),
    "a limit that is reached": (memory(60, limit=8, used=8), [PROBLEM]),
    "CPUs for each GPU": (cpus(8, 64), [OK]),
    "a quota": (cpus(0, 64, 4.0), [NOTE]),
    "few CPUs": (cpus(8, 8), [NOTE]),
    "few CPUs and no GPU": (cpus(0, 2), [OK]),
    "many files": (limits(65536), [OK]),
    "any number of files": (limits(-1), [OK]),
    "the usual limit": (limits(1024, files_hard=524288), [NOTE]),
    "few files": (limits(256), [PROBLEM]),
    "few processes": (limits(65536, processes=512), [OK, NOTE]),
    "a right clock": (clock(2026, True), [OK]),
    "an unkept clock": (clock(2026, False), [NOTE]),
    "1970": (clock(1970, True), [PROBLEM]),
    "an unknown clock": (clock(2026, None), []),
    "all compilers": (compilers(Tools("/usr/bin/gcc", "/usr/bin/g++")), [OK]),
    "no C compiler": (compilers(Tools()), [NOTE]),
    "CC that is not there": (compilers(Tools(), CC="icc"), [PROBLEM]),
    "no Python.h": (compilers(Tools(cc="gcc"), replace(TRITON, python_h=False)), [NOTE]),
    "no Triton": (compilers(Tools(cc="gcc"), replace(TRITON, triton=None)), [NOTE]),
    "no ptxas": (compilers(Tools(cc="gcc"), replace(TRITON, ptxas=None)), [NOTE]),
    "the toolkit's": (compilers(Tools(cc="gcc", ptxas="/p"), replace(TRITON, ptxas=None)), [OK]),
    "a path to nothing": (compilers(Tools(cc="gcc"), TRITON_PTXAS_PATH="/no"), [PROBLEM, OK]),
    "no C++ on a CPU": (compilers(Tools(), CPU), [NOTE]),
    "C++ on a CPU": (compilers(Tools(cxx="g++"), replace(CPU, python_h=False)), [OK]),
    "no scheduler": (scheduler(), []),
    "Slurm": (scheduler(SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="2"), [OK]),
    "fewer GPUs of Slurm": (scheduler(SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="1"), [OK, NOTE]),
    "a torchrun for each task": (scheduler(**TASKS), [NOTE]),
    "Kubernetes": (scheduler(KUBERNETES_SERVICE_HOST="10.0.0.1"), [OK]),
    "PBS": (scheduler(PBS_JOBID="8"), [OK]),
    "all GPUs": (scheduler(CUDA_VISIBLE_DEVICES="0,1"), [OK]),
    "none on purpose": (scheduler(GpuFacts(), CUDA_VISIBLE_DEVICES=""), [NOTE]),
    "a GPU that is not here": (visible("5"), [PROBLEM]),
    "one that is not here": (visible("0,5"), [PROBLEM]),
    "an order that differs": (visible("0"), [NOTE]),
    "a list in doubt": (scheduler(HERE._replace(warning="nvidia-smi -L: status 15")), [NOTE]),
    "no list": (scheduler(SILENT), [PROBLEM]),
    "no list for a choice": (scheduler(SILENT, CUDA_VISIBLE_DEVICES="0"), [PROBLEM]),
}


def test_each_part_of_the_machine_is_judged():
    def check(found, expected):
        assert levels(found) == expected

    check_cases(JUDGED, check)


def test_a_fix_can_be_copied():
    (full,) = disk(trouble="No space left on device")
    (few,) = limits(1024, files_hard=524288)
    assert ("TORCHINDUCTOR_CACHE_DIR" in full.fix, "ulimit -n 524288" in few.fix) == (True, True)


def test_the_directories_are_those_that_a_job_would_use(tmp_path):
    plain = host.directories({"HOME": "/home/u"}, "/work")
    assert plain["working directory"] == "/work"
    for name, role in (
        ("TMPDIR", "temporary files"),
        ("TORCHINDUCTOR_CACHE_DIR", "compile cache"),
        ("TRITON_CACHE_DIR", "Triton's cache"),
        ("HF_HOME", "models and data sets"),
    ):
        given = host.directories({"HOME": "/home/u", name: str(tmp_path)}, "/work")
        assert plain[role] != given[role] == str(tmp_path)


def test_a_directory_is_tried_and_no_file_is_left(tmp_path):
    seen = host.disk("compile cache", str(tmp_path / "a" / "b"))  # judged by the one above it
    assert (seen.place, seen.trouble, seen.free > 0) == (str(tmp_path), "", True)
    assert list(tmp_path.iterdir()) == []
    assert host.disk("compile cache", "/proc/self/cache").trouble
    (tmp_path / "cache").write_text("", encoding="utf-8")
    assert host.disk("compile cache", str(tmp_path / "cache")).trouble == "it is not a directory"


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


def written(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def test_memory_is_read_with_the_limits_of_the_control_group(tmp_path, monkeypatch):
    files = {
        "p/self/cgroup": "0::/job\n",
        "g/cgroup.controllers": "cpu memory",
        "g/job/memory.max": "4096",
        "g/job/memory.current": "9",
        "g/job/cpu.max": "150000 100000",
    }
    written(tmp_path, files)
    monkeypatch.setattr(cgroup, "PROC", str(tmp_path / "p"))
    monkeypatch.setattr(cgroup, "MOUNT", str(tmp_path / "g"))
    seen = host.memory()
    assert (seen.limit, seen.used, seen.quota) == (4096, 9, 1.5)
    assert seen.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_this_machines_clock_limits_and_log_are_read():
    assert host.clock().year >= 2024
    assert host.limits().files != 0
    read = kernellog.read(os.environ)
    assert read.source or read.trouble


def test_compilers_are_searched_for_as_triton_and_inductor_do(tmp_path):
    for name in ("clang", "g++", "mycc"):
        executable(tmp_path / name, "")
    path = {"PATH": str(tmp_path)}
    assert host.tools(path) == Tools(str(tmp_path / "clang"), str(tmp_path / "g++"), "")
    assert host.tools({**path, "CC": "mycc -O2"}).cc == str(tmp_path / "mycc")
    assert host.tools({**path, "CC": "icc"}).cc == ""


# the kernel log

KILLED = "Memory cgroup stats for /NVRM: Xid (PCI:0000:c1:00): 79, gone:"
XID = "NVRM: Xid (PCI:0000:c1:00): 79, gone"


def kmsg_says(tmp_path: pathlib.Path, text: str, **since: float) -> tuple[str, ...]:
    (tmp_path / "kmsg").write_text(text, encoding="utf-8")
    read = kernellog.read({}, str(tmp_path / "kmsg"), **since)
    assert read.source == str(tmp_path / "kmsg")
    return read.lines


def test_the_kernel_log_is_read_record_by_record_and_since_a_moment(tmp_path):
    assert kmsg_says(tmp_path, f"4,1,5,-;usb: hello\n4,2,6,-;{XID}\n") == (f"4,2,6,-;{XID}",)
    now = f"4,2,{int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)},-;NVRM: new"
    text = f"4,1,5,-;NVRM: old\n{now}\nNVRM: continued\n"
    assert kmsg_says(tmp_path, text, since_s=time.time() - 60) == (now,)
    # The kernel prints a user's name of a control group where it kills for lack of memory.
    for line in (KILLED, f"6,532,4930911001,-;{KILLED}", f"6,5,4,-; x;{KILLED}"):
        assert kmsg_says(tmp_path, f"{line}\n") == ()


def journald_says(tmp_path, *entries: object, ascii: bool = True, **since: float) -> kernellog.Log:
    lines = "".join(json.dumps(entry, ensure_ascii=ascii) + "\n" for entry in entries)
    (tmp_path / "log").write_text(lines, encoding="utf-8")
    to = shell(tmp_path / "asked")
    asked = f'case "$*" in *--output=json*) echo "$*" > {to} ;; *) exit 1 ;; esac'
    text = f"#!/bin/sh\n{asked}\nexec /bin/cat {shell(tmp_path / 'log')}\n"
    executable(tmp_path / "journalctl", text)
    return kernellog.read({"PATH": str(tmp_path)}, str(tmp_path / "none"), **since)


def test_journald_is_asked_where_the_log_may_not_be_read(tmp_path):
    messages = [{"MESSAGE": one} for one in (XID, "other", list(XID.encode()), None)]
    read = journald_says(tmp_path, *messages, since_s=1700000000.5)
    assert (read.source, read.lines) == ("journalctl", (XID, XID))
    assert (tmp_path / "asked").read_text(encoding="utf-8").endswith("--since=@1700000000\n")


@pytest.mark.parametrize("ascii", [True, False])
def test_a_programs_name_writes_no_line_of_the_driver(tmp_path, ascii):
    """journald takes back what the kernel has escaped."""
    for message in (
        f"traps: \n{XID}[12] trap int3",
        list(f"\n{XID}[12]: segfault at 0".encode()),
        f"\r{XID}[12]: segfault",
        f"cgroup /\u2028{XID}",
        f'cgroup /\u2028{{"MESSAGE": "{XID}"}}\u2028',
        "NVRM: Xid 79[12]: segfault at 0",
    ):
        read = journald_says(tmp_path, {"MESSAGE": message}, ascii=ascii)
        assert (read.source, read.lines) == ("journalctl", ())


@pytest.mark.parametrize("text", [None, "exit 1", "true"], ids=["none", "fails", "says nothing"])
def test_a_log_that_nobody_may_read_has_a_reason(tmp_path, text):
    if text:
        executable(tmp_path / "journalctl", f"#!/bin/sh\n{text}\n")
    read = kernellog.read({"PATH": str(tmp_path)}, str(tmp_path / "none"))
    assert (read.source, read.trouble != "") == ("", True)


# NUMA


BUSES = {"0000:18:00.0": 0, "0000:ad:00.0": 1}
NODES = {
    "unbound": (BUSES, {0: 8, 1: 8}, ["NUMA"]),
    "the other node is not allowed": (BUSES, {0: 8, 1: 0}, ["GPU 1"]),
    "one node": (BUSES, {0: 16}, []),
    "no GPU": ({}, {0: 8, 1: 8}, []),
    "bound to its node": ({"0000:18:00.0": 0}, {0: 8, 1: 0}, []),
}


def test_ranks_are_to_run_on_the_node_of_their_gpu(tmp_path):
    def check(gpus, nodes, areas):
        found = list(checks_host.numa(gpus, nodes, BUSES))
        assert [(f.area, f.level) for f in found] == [(area, NOTE) for area in areas]

    check_cases(NODES, check)
    allowed = sorted(os.sched_getaffinity(0))
    cpus = {"node0": f"{allowed[0]}\n", "node1": "9000-9003,9008\n", "node2": "\n"}
    files = {f"{node}/cpulist": text for node, text in cpus.items()}
    written(tmp_path, {**files, "possible": "0-2\n"})
    assert host.numa(str(tmp_path)) == {0: 1, 1: 0}
    assert host.numa(str(tmp_path / "none")) == {}
