"""Of MIG instances a process sees one: which, and under which name."""

import pytest
from gpu_machine import uuids

from saferun.model import Gpu

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
    gpu = "GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0"
    (found,) = machine.detect(visible=value).gpus
    assert found == Gpu(None, instance, "NVIDIA A100-SXM4-40GB", gpu)


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
    assert [found.number for found in machine.detect(visible="1").gpus] == [1]
    facts = machine.detect(visible="MIG-00000000-0000-0000-0000-000000000000")
    assert (facts.gpus, "names no MIG instance" in facts.warning) == ((), True)


@pytest.mark.parametrize("made", [False, True])
def test_instances_shown_by_the_driver_files_bring_nvidia_smi_in(machine, made):
    uuid = "GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0"
    machine.add("NVIDIA A100-SXM4-40GB", uuid, bus="0000:01:00.0", minor=0)
    (machine.proc / "capabilities" / "mig").mkdir(parents=True)
    mig = machine.proc / "capabilities" / "gpu0" / "mig"
    (mig / "gi1" / "ci0" if made else mig).mkdir(parents=True)
    machine.nvidia_smi_prints(MIG_A100)
    assert machine.detect().source == ("nvidia-smi" if made else "proc")
