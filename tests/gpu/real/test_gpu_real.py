"""On a real GPU machine: what `detect` says against nvidia-smi, CUDA's driver and torch."""

import importlib.util
import os
import re
import sys

import pytest
from repo import source
from sandbox import captured

from saferun.system import gpus

FACTS = gpus.detect({"PATH": os.environ.get("PATH", os.defpath)})

pytestmark = pytest.mark.skipif(not FACTS.gpus, reason="no NVIDIA GPU here")

TORCH = """
import torch
for device in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(device).name)
"""


def ask(code, visible):
    """Run a Python program under one value of CUDA_VISIBLE_DEVICES; return its lines."""
    done = captured(sys.executable, "-c", code, env=environment(visible), check=True)
    return done.stdout.splitlines()


def environment(visible):
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept if visible is None else {**kept, "CUDA_VISIBLE_DEVICES": visible}


def values():
    """Values to try: those of system/test_visible_devices.py, said with the UUIDs that are here."""
    first, last = FACTS.gpus[0].uuid, FACTS.gpus[-1].uuid
    plain = [None, "", "-1", "0", " 0", "0 ", "+0", "01", "0x1", "0,-1", "0,0", "0,99,0", "1,0"]
    plain += ["0abc", "abc", ",0", "0,,0", "NoDevFiles", "999999999999"]
    named = [first, first + "x", first[:12], " " + first, first.replace("GPU", "gpu")]
    listed = [f"{last},{first}", f"{first},{first}", f"{first},0", f"0,{first}", f"{first},GPU-x"]
    return [*plain, *named, *listed]


def test_the_gpus_are_those_that_nvidia_smi_lists():
    listed = captured("nvidia-smi", "-L", check=True).stdout
    expected = re.findall(r"^GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)$", listed, re.MULTILINE)
    assert [(str(g.number), g.name, g.uuid) for g in FACTS.gpus] == expected


def test_the_driver_files_and_nvidia_smi_give_the_same():
    asked = gpus.detect(environment(None), proc="/nowhere", timeout_s=30)
    assert asked.source == "nvidia-smi"
    assert asked.gpus == FACTS.gpus


@pytest.mark.parametrize("visible", values() if FACTS.gpus else [None], ids=repr)
def test_visible_devices_mean_what_cudas_driver_makes_of_them(visible):
    shown = [found.uuid for found in gpus.detect(environment(visible)).gpus]
    assert shown == ask(source("gpu/uuids_of_cuda"), visible)


@pytest.mark.parametrize("visible", [None, "0", ""], ids=repr)
def test_torch_sees_the_same_products(visible):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch here")
    assert [found.name for found in gpus.detect(environment(visible)).gpus] == ask(TORCH, visible)
