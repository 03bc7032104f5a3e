"""A whole run says of a slow rank what NVML says of its GPU beside the others'."""

import signal
import sys

import pytest
from fake_nvml import gpu
from fakecuda import uuid
from runs import program, run


@pytest.mark.slow
def test_a_capped_clock_stands_behind_the_rank_that_it_slows_down(machine):
    """The ranks are gloo's, and a busy loop does what the clock would."""
    machine.nvml.reports(gpu(0), gpu(1, GetClockInfo="1200", GetCurrentClocksEventReasons="64"))
    argv = ["--profile=h100", "--nproc-per-node=2", program("unequal_ranks"), "1.5"]
    environ = {**machine.environ, "ASKED": str(machine.folder / "asked")}
    command = [sys.executable, program("asks_soon")]
    with run(machine.folder, *argv, command=command, env=environ) as job:
        job.wait_for_message("rank 1 is slow: ")
        job.process.send_signal(signal.SIGTERM)
        job.end()
        job.nothing_lives()
        (event,) = job.events("slow")
    said = f"its GPU ({uuid(1)}) runs at 1200 MHz, the others at 1980 MHz"
    assert f"; {said}, is slowed down (HW Thermal Slowdown)" in job.err
    assert event["facts"][0].startswith(said)
