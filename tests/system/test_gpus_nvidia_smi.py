"""What nvidia-smi is asked where the driver's files do not tell, and how it may fail."""

import pytest
from cases import with_limits
from gpu_machine import A, B, uuids
from helpers import is_alive, until
from sandbox import shell


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("No devices were found\n", 6),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version\n", 18),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
        ("Failed to initialize NVML: Unknown Error\n", 0),
        ("", 0),
        ("\x1b[31m garbage \x00\xff\n", 0),
    ],
    ids=["none", "mismatch", "no driver", "unknown, status 0", "silence", "garbage"],
)
def test_a_failing_nvidia_smi_means_no_gpu_and_a_warning_that_quotes_it(machine, text, status):
    machine.nvidia_smi_prints(text, status)
    facts = machine.detect()
    assert facts.gpus == ()
    assert text.split("\n")[0].strip("\x1b \xff\x00")[:12] in facts.warning
    assert facts.warning.isprintable()  # one line, and nothing that a terminal would obey
    assert (f"status {status}" in facts.warning) == bool(status)
    assert ("printed nothing" in facts.warning) == (text == "")


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


def test_a_hanging_nvidia_smi_is_cut_off_and_killed_with_its_children(machine):
    script = """trap '' TERM INT HUP; sleep 60 & echo $! >>"$at"; while :; do sleep 1; done"""
    machine.nvidia_smi(f'at={shell(machine.bin / "pid")}; echo $$ >"$at"; {script}')
    begun = machine.bin / "pid"
    facts = with_limits(lambda s: machine.detect(timeout_s=s), lambda _: begun.exists())
    assert facts.gpus == ()
    assert "did not end within" in facts.warning
    for pid in begun.read_text(encoding="utf-8").split():
        until(lambda pid=pid: not is_alive(pid), f"process {pid} of the fake nvidia-smi is gone")


def test_a_hanging_nvidia_smi_does_not_lose_what_the_driver_files_show(machine):
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    machine.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
    machine.nvidia_smi("exec sleep 60")
    facts = machine.detect(timeout_s=0.4)
    assert uuids(facts) == [B]
    assert "did not end" in facts.warning
