"""Which GPUs the job will see: recorded driver files, fake programs, and CUDA's own rules.

The table of CUDA_VISIBLE_DEVICES is what CUDA's driver answered (cuInit, cuDeviceGetCount and
cuDeviceGetUuid; driver 580.159.04, two H200), value by value; tests/gpu asks it again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import with_limits
from repo import ROOT

from saferun.model import Gpu, GpuFacts
from saferun.system import gpus as gpu

A = "GPU-14e799be-cee2-7364-1ed2-56588c2c62e3"
B = "GPU-e533a614-68dd-10bf-5cbb-1d78bacbb601"

INFORMATION = """\
Model: \t\t {name}
IRQ:   \t\t 41
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.a5.00.1a
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Firmware: \t 580.159.04
GPU Excluded:\t {excluded}
"""

H200_PAIR = f"GPU 0: NVIDIA H200 (UUID: {A})\nGPU 1: NVIDIA H200 (UUID: {B})\n"

MIG_A100 = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 1g.5gb      Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-a2ebcd1d-e45e-eb0a-3d4b-0a1a4dd7cc21)
"""

OLD_MIG = """\
GPU 0: A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.5gb      Device  0: (UUID: MIG-GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77/13/0)
"""


class FakeMachine:
    """A driver's /proc and /dev tree, and programs on PATH, in a directory of the test's."""

    def __init__(self, root):
        self.proc, self.dev, self.bin = root / "proc", root / "dev", root / "bin"
        self.dev.mkdir()
        self.bin.mkdir()
        for tool in ("cat", "dirname", "sleep", "touch", "yes"):  # no more: a real nvidia-smi
            (self.bin / tool).symlink_to(shutil.which(tool))  # may lie beside them

    def add(self, name, uuid, *, bus, minor, excluded="No", node=True):
        folder = self.proc / "gpus" / bus
        folder.mkdir(parents=True)
        text = INFORMATION.format(name=name, uuid=uuid, bus=bus, minor=minor, excluded=excluded)
        (folder / "information").write_text(text)
        if node:
            (self.dev / f"nvidia{minor}").touch()
        return folder / "information"

    def add_h200_pair(self):
        self.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
        self.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0)

    def nvidia_smi(self, script):
        program = self.bin / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def nvidia_smi_prints(self, text, status=0):
        (self.bin / "answer").write_text(text)
        self.nvidia_smi(f'cat "$(dirname "$0")/answer"; exit {status}')

    def detect(self, visible=None, timeout_s=300.0, **environ):
        environ["PATH"] = str(self.bin)
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        return gpu.detect(environ, proc=str(self.proc), dev=str(self.dev), timeout_s=timeout_s)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def uuids(facts):
    return [found.uuid for found in facts.gpus]


# The driver's files


def test_driver_files_give_name_uuid_and_pci_order_without_any_program(machine):
    machine.add_h200_pair()
    machine.nvidia_smi(f"touch {machine.bin}/was-run")
    facts = machine.detect()
    assert facts == GpuFacts((Gpu(0, A, "NVIDIA H200"), Gpu(1, B, "NVIDIA H200")), "proc", "")
    assert not (machine.bin / "was-run").exists()


def test_sixteen_gpus_are_numbered_by_the_hexadecimal_pci_address(machine):
    buses = [f"0000:{bus:02x}:00.0" for bus in range(0x09, 0x09 + 14)] + [
        "0001:00:00.0",
        "10000:00:00.0",
    ]
    for minor, bus in enumerate(reversed(buses)):
        machine.add("Tesla V100-SXM3-32GB", f"GPU-{bus}", bus=bus, minor=minor)
    assert uuids(machine.detect()) == [f"GPU-{bus}" for bus in buses]
    assert [found.number for found in machine.detect().gpus] == list(range(16))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GH200 480GB",
        "Tesla K80",
    ],
)
def test_product_names_arrive_as_the_driver_spells_them(machine, name):
    machine.add(name, A, bus="0000:01:00.0", minor=0)
    assert gpu.product(machine.detect()) == name


def test_an_excluded_gpu_is_neither_shown_nor_counted(machine):
    machine.add("NVIDIA A100", A, bus="0000:01:00.0", minor=0, excluded="Yes")
    machine.add("NVIDIA A100", B, bus="0000:02:00.0", minor=1)
    assert machine.detect().gpus == (Gpu(0, B, "NVIDIA A100"),)


def test_a_uuid_that_the_driver_does_not_know_yet_is_left_empty(machine):
    machine.add("Tesla K80", "GPU-????????-????-????-????-????????????", bus="0:3:0.0", minor=0)
    assert machine.detect().gpus == (Gpu(0, "", "Tesla K80"),)


@pytest.mark.parametrize(("visible", "found"), [(B, [B]), ("0", [A]), (None, [A, B])])
def test_an_unknown_uuid_is_looked_up_since_locks_need_it(machine, visible, found):
    machine.add("NVIDIA H200", "GPU-????????-????-????-????-????????????", bus="0:3:0.0", minor=0)
    machine.nvidia_smi_prints(H200_PAIR)
    assert uuids(machine.detect(visible=visible)) == found


@pytest.mark.skipif(os.geteuid() == 0, reason="root opens every file")
def test_a_gpu_whose_node_is_closed_to_us_is_not_counted_as_user(machine):
    machine.add_h200_pair()
    (machine.dev / "nvidia0").chmod(0)
    assert machine.detect().gpus == (Gpu(0, B, "NVIDIA H200"),)


def test_a_container_with_one_of_two_gpus_sees_one(machine):
    """The files show the host's GPUs; `params` is how a container forbids to make nodes."""
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    machine.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
    (machine.proc / "params").write_text("ModifyDeviceFiles: 0\n")
    facts = machine.detect(visible="0")
    assert facts == GpuFacts((Gpu(0, B, "NVIDIA H200"),), "proc", "")


def test_a_container_that_was_given_no_gpu_sees_none_and_nothing_is_said(machine):
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    assert machine.detect() == GpuFacts()


def test_a_node_that_may_still_be_made_is_left_to_nvidia_smi(machine):
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    machine.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
    machine.nvidia_smi_prints(H200_PAIR)
    facts = machine.detect()
    assert (uuids(facts), facts.source, facts.warning) == ([A, B], "nvidia-smi", "")


@pytest.mark.parametrize(
    "text", ["", "Model: \t\t NVIDIA H2", "\0\xff\n::\n"], ids=["empty", "cut off", "binary"]
)
def test_a_half_written_file_is_said_and_the_other_gpus_kept(machine, text):
    machine.add_h200_pair()
    broken = machine.proc / "gpus" / "0000:00:06.0" / "information"
    broken.write_text(text)
    facts = machine.detect()
    assert uuids(facts) == [B]
    assert str(broken) in facts.warning


def test_a_file_that_cannot_be_read_is_left_to_nvidia_smi(machine):
    machine.add_h200_pair()
    broken = machine.proc / "gpus" / "0000:00:06.0" / "information"
    broken.unlink()
    broken.mkdir()  # reading it fails for root, too
    machine.nvidia_smi_prints(H200_PAIR)
    assert uuids(machine.detect()) == [A, B]


def test_no_gpu_and_no_word_on_a_machine_without_nvidia(machine):
    assert machine.detect() == GpuFacts()
    assert machine.detect(visible="0,1") == GpuFacts()


# nvidia-smi


def test_nvidia_smi_is_asked_where_the_driver_shows_no_files(machine):
    machine.nvidia_smi_prints(H200_PAIR)
    facts = machine.detect()
    gpus = (Gpu(0, A, "NVIDIA H200"), Gpu(1, B, "NVIDIA H200"))
    assert facts == GpuFacts(gpus, "nvidia-smi", "")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("No devices were found\n", 6),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version\n", 18),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
        ("Failed to initialize NVML: Unknown Error\n", 255),
        ("Failed to initialize NVML: Unknown Error\n", 0),
        ("Segmentation fault\n", 139),
        ("\x1b[31m garbage \x00\xff\n", 0),
    ],
    ids=["none", "mismatch", "no driver", "unknown", "unknown, status 0", "crash", "garbage"],
)
def test_a_failing_nvidia_smi_means_no_gpu_and_a_warning_that_quotes_it(machine, text, status):
    machine.nvidia_smi_prints(text, status)
    facts = machine.detect()
    assert facts.gpus == ()
    assert text.split("\n")[0].strip("\x1b \xff\x00")[:12] in facts.warning
    assert facts.warning.isprintable()  # one line, and nothing that a terminal would obey
    assert (f"status {status}" in facts.warning) == bool(status)


def test_an_nvidia_smi_that_says_nothing_is_a_warning(machine):
    machine.nvidia_smi_prints("")
    assert "printed nothing" in machine.detect().warning


@pytest.mark.parametrize(
    "lost",
    [
        "Unable to determine the device handle for GPU0000:0B:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot",
    ],
)
def test_a_lost_gpu_is_reported_and_the_others_are_kept(machine, lost):
    machine.nvidia_smi_prints(f"GPU 0: NVIDIA H200 (UUID: {A})\n{lost}\n", 15)
    facts = machine.detect()
    assert uuids(facts) == [A]
    assert lost in facts.warning


def test_an_nvidia_smi_that_cannot_be_started_is_a_warning(machine):
    machine.nvidia_smi("")
    (machine.bin / "nvidia-smi").write_bytes(b"\x7fELF but not really")
    assert "cannot be run" in machine.detect().warning


HANGS = {
    "sleeps": "exec sleep 60",
    "ignores SIGTERM": "trap '' TERM INT HUP; while :; do sleep 1; done",
    "waits for its child": "sleep 60 & echo $! >>${0%/*}/pid; wait",
    "prints without end": "exec yes",
    "closes its output": "exec >&- 2>&-; exec sleep 60",
}


@pytest.mark.parametrize("script", HANGS.values(), ids=HANGS)
def test_a_hanging_nvidia_smi_is_cut_off_and_killed_with_its_children(machine, script):
    machine.nvidia_smi(f"echo $$ >{machine.bin}/pid; {script}")
    begun = machine.bin / "pid"
    facts = with_limits(lambda s: machine.detect(timeout_s=s), lambda _: begun.exists())
    assert facts.gpus == ()
    assert "did not end within" in facts.warning
    for pid in (machine.bin / "pid").read_text().split():
        wait_until(lambda pid=pid: not alive(pid), f"process {pid} of the fake nvidia-smi is gone")


def test_a_daemon_that_keeps_the_pipe_open_is_not_waited_for(machine):
    machine.nvidia_smi_prints(H200_PAIR)
    program = machine.bin / "nvidia-smi"
    script = program.read_text().replace("cat", f"sleep 60 & echo $! >{machine.bin}/pid; cat")
    program.write_text(script)
    facts = machine.detect(timeout_s=30)
    try:
        assert uuids(facts) == [A, B]
        assert facts.warning == ""  # else: it did not end within 30 s
        assert alive(int((machine.bin / "pid").read_text()))
    finally:
        os.kill(int((machine.bin / "pid").read_text()), signal.SIGKILL)


def test_a_hanging_nvidia_smi_does_not_lose_what_the_driver_files_show(machine):
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    machine.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
    machine.nvidia_smi("exec sleep 60")
    facts = machine.detect(timeout_s=0.4)
    assert uuids(facts) == [B]
    assert "did not end" in facts.warning


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, what, within_s=30.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        time.sleep(0.01)


# CUDA_VISIBLE_DEVICES, as CUDA reads it

MEASURED = {
    "": [],
    "-1": [],
    "NoDevFiles": [],
    "NoDevFilesX": [],
    "0": [A],
    " 0": [A],
    "0 ": [A],
    "\t1": [B],
    "1,0": [B, A],
    "00": [A],
    "01": [B],
    "010": [],
    "+1": [B],
    " +1": [B],
    "-0": [A],
    "--0": [],
    "- 0": [],
    "0x1": [A],
    "1.5": [B],
    "0abc": [A],
    "0;1": [A],
    "1 0": [B],
    "2": [],
    "0,1,2": [A, B],
    "0,-1": [A],
    "0,-1,0": [A],
    "0,9,0": [A],
    "0,0": [],
    "0,0,9": [],
    "0,0xyz": [],
    "1,0,1": [],
    "0,1,abc,0": [A, B],
    "0,": [A],
    ",0": [],
    "0,,0": [A],
    "abc": [],
    "all": [],
    "99999999999": [],
    A: [A],
    A[:8]: [A],
    "GPU-1": [A],
    "GPU-": [],
    "GPU" + A.upper()[3:]: [A],
    "gpu" + A[3:]: [],
    A[4:]: [],
    " " + A: [],
    A + " ": [A],
    A + "xyz": [A],
    A[:8] + "zz": [],
    f"{B},{A}": [B, A],
    f"{A}, {B}": [A],
    f"{A} ,{B}": [A, B],
    f"{A},{A}": [],
    f"{A},{A[:8]}": [],
    f"{A},GPU-xyz": [A],
    f"GPU-xyz,{A}": [],
    f"0,{A}": [A],
    f"{A},1": [A],
    "0,MIG-abc": [A],
    "MIG-abc": [],
    f"MIG-{A}/0/0x": [],
    "1,NoDevFiles": [B],
}


@pytest.mark.parametrize(("value", "shown"), MEASURED.items(), ids=[repr(v) for v in MEASURED])
def test_visible_devices_means_what_cuda_makes_of_it(machine, value, shown):
    machine.add_h200_pair()
    if value.startswith("MIG-"):  # the one case that cannot be answered from the files
        machine.nvidia_smi_prints(H200_PAIR.replace(A, "GPU-other"))
    assert uuids(machine.detect(visible=value)) == shown


def test_an_index_keeps_the_number_that_nvidia_smi_gives(machine):
    machine.add_h200_pair()
    assert [found.number for found in machine.detect(visible="1,0").gpus] == [1, 0]


@pytest.mark.parametrize("value", ["", " ", "-1", "NoDevFiles", "0", "1,0", "0,-1", A])
def test_nothing_is_said_about_a_value_that_is_in_order(machine, value):
    machine.add_h200_pair()
    assert machine.detect(visible=value).warning == ""


@pytest.mark.parametrize(
    ("value", "word"),
    [("0,0", "repeated"), ("0,7", "'7' names no GPU"), ("all", "shows none"), ("0,x", "1 before")],
)
def test_a_value_that_cuda_cuts_or_voids_is_said_with_the_entry(machine, value, word):
    machine.add_h200_pair()
    warning = machine.detect(visible=value).warning
    assert word in warning
    assert f"CUDA_VISIBLE_DEVICES={value}" in warning


def test_hidden_gpus_are_not_even_asked_for(machine):
    machine.nvidia_smi(f"touch {machine.bin}/was-run")
    for value in ("", "-1", "NoDevFiles"):
        assert machine.detect(visible=value) == GpuFacts()
    assert not (machine.bin / "was-run").exists()


def test_the_container_runtimes_variable_is_not_cudas(machine):
    machine.add_h200_pair()
    assert uuids(machine.detect(NVIDIA_VISIBLE_DEVICES="void")) == [A, B]


# Different GPUs in one machine


@pytest.fixture
def mixed(machine: FakeMachine) -> FakeMachine:
    machine.add("NVIDIA GeForce GTX 1080", A, bus="0000:01:00.0", minor=0)
    machine.add("NVIDIA GeForce RTX 5090", B, bus="0000:02:00.0", minor=1)
    return machine


def test_different_gpus_have_no_common_product(mixed):
    assert gpu.product(mixed.detect()) is None
    assert gpu.product(mixed.detect(visible=B)) == "NVIDIA GeForce RTX 5090"


def test_no_gpu_has_no_product():
    assert gpu.product(GpuFacts()) is None
    assert gpu.product(GpuFacts((Gpu(0, A, ""),))) is None


def test_a_number_among_different_gpus_is_in_doubt_unless_the_order_is_set(mixed):
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in mixed.detect(visible="1").warning
    assert mixed.detect(visible="1", CUDA_DEVICE_ORDER="PCI_BUS_ID").warning == ""


@pytest.mark.parametrize("value", [None, "1,0", B])
def test_the_order_is_no_doubt_where_it_changes_nothing(mixed, value):
    assert mixed.detect(visible=value).warning == ""


# MIG


@pytest.mark.parametrize(
    ("value", "instance"),
    [
        ("MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d", "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"),
        (
            "MIG-GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0/1/0",
            "MIG-GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0/1/0",
        ),
        ("0", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"),
        ("GPU-e86c", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"),
        (None, "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"),
    ],
    ids=["uuid", "old form", "index of its GPU", "UUID of its GPU", "unset"],
)
def test_of_mig_instances_one_is_shown_under_its_gpus_name(machine, value, instance):
    machine.nvidia_smi_prints(MIG_A100)
    assert machine.detect(visible=value).gpus == (Gpu(None, instance, "NVIDIA A100-SXM4-40GB"),)


def test_a_whole_gpu_beside_mig_is_shown_when_it_is_named(machine):
    machine.nvidia_smi_prints(MIG_A100)
    assert [found.number for found in machine.detect(visible="1").gpus] == [1]


def test_an_old_drivers_instance_is_found_by_its_own_name(machine):
    machine.nvidia_smi_prints(OLD_MIG)
    name = "MIG-GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77/13/0"
    assert uuids(machine.detect(visible=name)) == [name]


def test_several_named_instances_are_one_with_a_warning(machine):
    machine.nvidia_smi_prints(MIG_A100)
    value = "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d,MIG-c7384736-a75d-5afc-978f-d2f1294409fd"
    facts = machine.detect(visible=value)
    assert uuids(facts) == [value.split(",")[0]]
    assert "first instance only" in facts.warning


def test_an_instance_that_is_not_there_is_a_warning(machine):
    machine.nvidia_smi_prints(MIG_A100)
    facts = machine.detect(visible="MIG-00000000-0000-0000-0000-000000000000")
    assert facts.gpus == ()
    assert "names no MIG instance" in facts.warning


@pytest.mark.parametrize("made", [False, True])
def test_instances_shown_by_the_driver_files_bring_nvidia_smi_in(machine, made):
    uuid = "GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0"
    machine.add("NVIDIA A100-SXM4-40GB", uuid, bus="0000:01:00.0", minor=0)
    (machine.proc / "capabilities" / "mig").mkdir(parents=True)
    mig = machine.proc / "capabilities" / "gpu0" / "mig"
    (mig / "gi1" / "ci0" if made else mig).mkdir(parents=True)
    machine.nvidia_smi_prints(MIG_A100)
    assert machine.detect().source == ("nvidia-smi" if made else "proc")


# Cost


def test_a_machine_without_gpu_is_recognised_by_two_reads_and_no_heavy_import():
    """The driver's list of GPUs is looked at, and PATH for nvidia-smi, by access(2)."""
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "tests" / "programs" / "system" / "detect_cost.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    imported, reads = done.stdout.splitlines()
    assert imported == "[]"
    assert int(reads) <= 2


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23", "570.86.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  1010.10", "1010.10"),
        ("garbage", ""),
    ],
)
def test_the_drivers_version_is_read_from_its_own_file(tmp_path, line, version):
    (tmp_path / "version").write_text(f"{line}\nGCC version: gcc 12.3.0\n")
    assert gpu.driver_version(str(tmp_path)) == version
    assert gpu.driver_version(str(tmp_path / "nothing")) == ""
