"""What a slow rank's GPU and CPU show beside the others'."""

import os
import subprocess
import sys

import pytest
from fake_nvml import Nvml, gpu
from fakecuda import uuid
from helpers import until

from saferun.supervise.watch import rank_facts
from saferun.supervise.watch.rank_facts import CpuState, answer_of, ask_cards

RANKS = {0: 500, 1: 501, 2: 502, 3: 503}
UUIDS = [uuid(n) for n in range(4)]


@pytest.fixture
def library(tmp_path) -> Nvml:
    return Nvml(tmp_path / "nvml")


def facts(library: Nvml, rank: int = 1, holders: dict[int, list[int]] | None = None, **changed):
    """Return what is said of a rank whose GPU gives other answers than the others'."""
    held = holders or {}
    cards = [gpu(n, held.get(n, ()), **(changed if n == 1 else {})) for n in range(4)]
    library.reports(*cards)
    asked = ask_cards({"LD_LIBRARY_PATH": str(library.folder)})
    until(asked.has_ended, "the answer")
    found = rank_facts.of_ranks(answer_of(asked), RANKS, UUIDS)
    return rank_facts.of_gpu(found, rank, RANKS.values())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"GetClockInfo": "1200"}, "runs at 1200 MHz, the others at 1980 MHz"),
        ({"GetCurrentClocksEventReasons": "4"}, "is slowed down (SW Power Cap)"),
        ({"GetCurrentClocksEventReasons": "64"}, "is slowed down (HW Thermal Slowdown)"),
        ({"GetEnforcedPowerLimit": "350000"}, "has a power limit of 350.00 W, the others 700.00 W"),
        ({"GetCurrPcieLinkWidth": "8"}, "has a PCIe link of 8x, the others 16x"),
        (
            {"GetMemoryErrorCounter.1.0.2": "3"},
            "has counted 3 errors (ECC Errors/Volatile/DRAM Uncorrectable)",
        ),
    ],
)
def test_what_differs_from_the_others_is_said_of_the_gpu_of_the_rank(library, changed, said):
    assert facts(library, **changed) == [f"its GPU ({uuid(1)}) {said}"]
    assert facts(library, rank=2, **changed) == [], "nothing is wrong with this one"


def test_a_process_that_is_not_the_jobs_is_named(library):
    said = facts(library, holders={1: [501, 77]})
    assert said == [f"its GPU ({uuid(1)}) is used by process 77, which is not of the job"]


def test_the_gpu_of_a_rank_is_the_one_that_it_has_memory_of(library):
    """Ranks may have taken theirs in another order."""
    said = facts(library, rank=3, holders={1: [503], 3: [501]}, GetClockInfo="1200")
    assert said == [f"its GPU ({uuid(1)}) runs at 1200 MHz, the others at 1980 MHz"]


@pytest.mark.parametrize("general", [{"Init_v2": "!9"}, {"Init_v2": "crash"}, {"Init_v2": "hang"}])
def test_without_an_answer_nothing_is_said(library, general):
    library.reports(gpu(0), gpu(1), **general)
    asked = ask_cards({"LD_LIBRARY_PATH": str(library.folder)})
    if general["Init_v2"] == "hang":
        until(lambda: library.asked, "it is asked")
    else:
        until(asked.has_ended, "the answer")
    assert rank_facts.of_ranks(answer_of(asked), RANKS, UUIDS) == {}


def state(at_s: float = 0.0, cpus: int = 16, delay_s: float = 0.0, swapped_mib: int = 0):
    return CpuState(at_s, frozenset(range(cpus)), delay_s, swapped_mib)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (state(100.0, delay_s=24.0), "it waited 24% of the time for a CPU, beside other work"),
        (state(100.0, cpus=2), "it may run on 2 CPUs, the others on 16 or more"),
        (state(100.0, swapped_mib=1200), "1200 MiB of it are in swap"),
        (state(100.0, delay_s=2.0), None),
    ],
)
def test_what_differs_is_said_of_the_cpu_of_the_rank(mine, said):
    before = {rank: state() for rank in RANKS}
    now = {**{rank: state(100.0, delay_s=1.0) for rank in RANKS}, 1: mine}
    assert rank_facts.of_cpu(before, now, 1) == ([said] if said else [])
    assert rank_facts.of_cpu(before, now, 2) == []


def test_what_all_ranks_share_is_no_fact_of_one(library):
    assert facts(library, GetClockInfo="1900", GetTemperatureV="80") == []
    before = {rank: state() for rank in RANKS}
    now = {rank: state(100.0, delay_s=30.0) for rank in RANKS}
    assert rank_facts.of_cpu(before, now, 1) == []


def test_what_the_host_takes_is_said_of_the_machine():
    assert rank_facts.of_machine((10, 1000), (110, 2000)) == [
        "the host took 10% of this machine's CPU time (steal)"
    ]
    assert rank_facts.of_machine((10, 1000), (11, 2000)) == []
    assert rank_facts.of_machine((0, 0), (0, 0)) == []


def test_the_state_of_a_process_is_read_from_proc():
    code = "import os; os.sched_setaffinity(0, {0}); print('set', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"set\n"
        found = rank_facts.cpu_state(child.pid, 3.0)
        child.kill()
    assert (found.at_s, found.cpus) == (3.0, frozenset({0}))
    ours = rank_facts.cpu_state(os.getpid(), 0.0)
    assert ours.cpus == os.sched_getaffinity(0)
    assert ours.delay_s > 0
    assert rank_facts.cpu_state(child.pid, 0.0) == CpuState(0.0, frozenset(), 0.0, 0)
