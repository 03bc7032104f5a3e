"""Which GPUs the job will see: recorded driver files, and different GPUs in one machine."""

import subprocess
import sys

import pytest
from gpu_machine import H200_PAIR, A, B, FakeMachine, uuids
from repo import ROOT

from saferun.model import Gpu, GpuFacts
from saferun.system import gpus as gpu


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


def test_an_excluded_gpu_is_neither_shown_nor_counted(machine):
    machine.add("NVIDIA A100", A, bus="0000:01:00.0", minor=0, excluded="Yes")
    machine.add("NVIDIA A100", B, bus="0000:02:00.0", minor=1)
    assert machine.detect().gpus == (Gpu(0, B, "NVIDIA A100"),)


@pytest.mark.parametrize(("visible", "found"), [(B, [B]), ("0", [A]), (None, [A, B])])
def test_an_unknown_uuid_is_looked_up_since_locks_need_it(machine, visible, found):
    machine.add("NVIDIA H200", "GPU-????????-????-????-????-????????????", bus="0:3:0.0", minor=0)
    machine.nvidia_smi_prints(H200_PAIR)
    assert uuids(machine.detect(visible=visible)) == found


def test_a_container_with_one_of_two_gpus_sees_one(machine):
    """The files show the host's GPUs; `params` is how a container forbids to make nodes."""
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    machine.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
    (machine.proc / "params").write_text("ModifyDeviceFiles: 0\n", encoding="utf-8")
    facts = machine.detect(visible="0")
    assert facts == GpuFacts((Gpu(0, B, "NVIDIA H200"),), "proc", "")


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
    broken.write_text(text, encoding="utf-8")
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


# Different GPUs in one machine


@pytest.fixture
def mixed(machine: FakeMachine) -> FakeMachine:
    machine.add("NVIDIA GeForce GTX 1080", A, bus="0000:01:00.0", minor=0)
    machine.add("NVIDIA GeForce RTX 5090", B, bus="0000:02:00.0", minor=1)
    return machine


def test_a_number_among_different_gpus_is_in_doubt_unless_the_order_is_set(mixed):
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in mixed.detect(visible="1").warning
    assert mixed.detect(visible="1", CUDA_DEVICE_ORDER="PCI_BUS_ID").warning == ""


@pytest.mark.parametrize("value", [None, "1,0", B])
def test_the_order_is_no_doubt_where_it_changes_nothing(mixed, value):
    assert mixed.detect(visible=value).warning == ""


# Cost


def test_a_machine_without_gpu_is_recognised_by_two_reads():
    """The driver's list of GPUs is looked at, and PATH for nvidia-smi, by access(2)."""
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "tests" / "programs" / "system" / "detect_cost.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    assert int(done.stdout) <= 2


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
    (tmp_path / "version").write_text(f"{line}\nGCC version: gcc 12.3.0\n", encoding="utf-8")
    assert gpu.driver_version(str(tmp_path)) == version
    assert gpu.driver_version(str(tmp_path / "nothing")) == ""
