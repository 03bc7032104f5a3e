"""CUDA_VISIBLE_DEVICES, as CUDA reads it.

The table is what CUDA's driver answered (cuInit, cuDeviceGetCount and cuDeviceGetUuid; driver
580.159.04, two H200), value by value; tests/gpu asks it again.
"""

import pytest
from cases import check_cases
from gpu_machine import H200_PAIR, A, B, uuids

from saferun.model import GpuFacts

MEASURED = {
    "": [],
    "-1": [],
    "NoDevFiles": [],
    "0": [A],
    " 0": [A],
    "\t1": [B],
    "1,0": [B, A],
    "01": [B],
    "+1": [B],
    "-0": [A],
    "- 0": [],
    "0x1": [A],
    "0abc": [A],
    "1 0": [B],
    "0,1,2": [A, B],
    "0,-1": [A],
    "0,9,0": [A],
    "0,0": [],
    "0,1,abc,0": [A, B],
    "0,": [A],
    "0,,0": [A],
    "abc": [],
    "99999999999": [],
    A: [A],
    "GPU-1": [A],
    "GPU-": [],
    "GPU" + A.upper()[3:]: [A],
    "gpu" + A[3:]: [],
    A + " ": [A],
    A + "xyz": [A],
    f"{B},{A}": [B, A],
    f"{A}, {B}": [A],
    f"{A} ,{B}": [A, B],
    f"{A},{A[:8]}": [],
    f"{A},GPU-xyz": [A],
    f"0,{A}": [A],
    f"{A},1": [A],
    "0,MIG-abc": [A],
    "MIG-abc": [],
    f"MIG-{A}/0/0x": [],
}


def test_visible_devices_means_what_cuda_makes_of_it(machine):
    machine.add_h200_pair()
    # Of MIG alone nvidia-smi is asked: it names another GPU, so that other answers are not its.
    machine.nvidia_smi_prints(H200_PAIR.replace(A, "GPU-other"))

    def check(value, shown):
        assert uuids(machine.detect(visible=value)) == shown

    check_cases(MEASURED.items(), check)


@pytest.mark.parametrize("value", [" ", "NoDevFiles", "1,0", "0,-1", A])
def test_nothing_is_said_about_a_value_that_is_in_order(machine, value):
    machine.add_h200_pair()
    facts = machine.detect(visible=value)
    assert facts.warning == ""
    if value == "1,0":  # an index keeps the number that nvidia-smi gives
        assert [found.number for found in facts.gpus] == [1, 0]


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
