"""What nvidia-smi is asked where the driver's files do not tell, and how it may fail."""

from __future__ import annotations

import os
import signal

import pytest
from cases import with_limits
from gpu_machine import H200_PAIR, A, B, uuids
from helpers import is_alive, until

from saferun.model import Gpu, GpuFacts


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
        until(lambda pid=pid: not is_alive(pid), f"process {pid} of the fake nvidia-smi is gone")


def test_an_nvidia_smi_that_prints_without_end_is_cut_off(machine):
    machine.nvidia_smi("exec yes")
    assert "it wrote more than 8 MiB" in machine.detect().warning


def test_a_daemon_that_keeps_the_pipe_open_is_not_waited_for(machine):
    machine.nvidia_smi_prints(H200_PAIR)
    program = machine.bin / "nvidia-smi"
    script = program.read_text().replace("cat", f"sleep 60 & echo $! >{machine.bin}/pid; cat")
    program.write_text(script)
    facts = machine.detect(timeout_s=30)
    try:
        assert uuids(facts) == [A, B]
        assert facts.warning == ""  # else: it did not end within 30 s
        assert is_alive(int((machine.bin / "pid").read_text()))
    finally:
        os.kill(int((machine.bin / "pid").read_text()), signal.SIGKILL)


def test_a_hanging_nvidia_smi_does_not_lose_what_the_driver_files_show(machine):
    machine.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0, node=False)
    machine.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
    machine.nvidia_smi("exec sleep 60")
    facts = machine.detect(timeout_s=0.4)
    assert uuids(facts) == [B]
    assert "did not end" in facts.warning
