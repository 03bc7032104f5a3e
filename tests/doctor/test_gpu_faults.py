"""What doctor makes of the report on each GPU."""

from __future__ import annotations

import pytest
from cases import check_cases
from fake_smi import FILES, fields, reported

from saferun.doctor.checks import checks_gpu
from saferun.model import NOTE, OK, PROBLEM


def judged(changed, mine=(), processes=None):
    """Judge one GPU whose report has some fields changed."""
    return checks_gpu.judge(reported(fields(0, **changed), processes=processes), FILES, mine)


def test_a_healthy_gpu_is_one_finding():
    (found,) = judged({})
    assert (found.level, found.area) == (OK, "GPU 0")
    assert "H200" in found.what


FAULTS = {
    "recovery action": ({"GPU Recovery Action": "Reset"}, PROBLEM, "asks for: Reset"),
    "reboot": ({"GPU Recovery Action": "Reboot"}, PROBLEM, "asks for: Reboot"),
    "reset required": ({"GPU Reset Status/Reset Required": "Yes"}, PROBLEM, "asks for: Reset"),
    "drain": (
        {"GPU Reset Status/Drain and Reset Recommended": "Yes"},
        PROBLEM,
        "asks for: Drain and Reset",
    ),
    "remap pending": ({"Remapped Rows/Pending": "Yes"}, PROBLEM, "waits to be replaced"),
    "remap failed": (
        {"Remapped Rows/Remapping Failure Occurred": "Yes"},
        PROBLEM,
        "could not be replaced",
    ),
    "rows remapped": ({"Remapped Rows/Uncorrectable Error": "2"}, NOTE, "2 bad rows"),
    "page pending": ({"Retired Pages/Pending Page Blacklist": "Yes"}, PROBLEM, "bad page"),
    "channel repair": ({"ECC Errors/Channel Repair Pending": "Yes"}, PROBLEM, "memory channel"),
    "unrepairable": ({"ECC Errors/Unrepairable Memory": "Yes"}, PROBLEM, "cannot be repaired"),
    "SRAM threshold": (
        {"ECC Errors/Aggregate/SRAM Threshold Exceeded": "Yes"},
        PROBLEM,
        "more SRAM errors",
    ),
    "errors once": ({"ECC Errors/Aggregate/DRAM Uncorrectable": "7"}, NOTE, "7 uncorrectable"),
    "ECC off": ({"ECC Mode/Current": "Disabled", "ECC Mode/Pending": "Disabled"}, NOTE, "is off"),
    "ECC changes": ({"ECC Mode/Pending": "Disabled"}, NOTE, "after the next reset"),
    "hot": (
        {
            "Clocks Event Reasons/HW Slowdown": "Active",
            "Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown": "Active",
        },
        PROBLEM,
        "too hot",
    ),
    "hot, before 535": ({"Clocks Throttle Reasons/HW Thermal Slowdown": "Active"}, PROBLEM, "hot"),
    "power brake": (
        {"Clocks Event Reasons/HW Slowdown/HW Power Brake Slowdown": "Active"},
        PROBLEM,
        "power supply",
    ),
    "slowed by the driver": (
        {"Clocks Event Reasons/SW Thermal Slowdown": "Active"},
        NOTE,
        "temperature limit",
    ),
    "was hot": (
        {"Clocks Event Reasons Counters/HW Thermal Slowdown": "600000000 us"},
        NOTE,
        "600 s",
    ),
    "MIG": ({"MIG Mode/Current": "Enabled"}, NOTE, "cut by MIG"),
    "exclusive": ({"Compute Mode": "Exclusive_Process"}, NOTE, "one process"),
    "prohibited": ({"Compute Mode": "Prohibited"}, PROBLEM, "Prohibited"),
    "fewer lanes": ({"PCI/GPU Link Info/Link Width/Current": "4x"}, NOTE, "4 of 16 lanes"),
    "no persistence": ({"Persistence Mode": "Disabled"}, NOTE, "persistence mode is off"),
    "fabric not started": ({"Fabric/State": "Not Started"}, PROBLEM, "error 802"),
    "fabric starting": ({"Fabric/State": "In Progress"}, PROBLEM, "not ready"),
    "fabric failed": ({"Fabric/Status": "Unknown Error (0x3)"}, PROBLEM, "joined"),
    "fabric unhealthy": ({"Fabric/Health/Summary": "Unhealthy"}, PROBLEM, "health: Unhealthy"),
    "lost": ({"Fan Speed": "[GPU is lost]"}, PROBLEM, "does not answer"),
}


def test_each_fault_in_the_report_is_one_finding():
    def check(changed, level, clause):
        (found,) = judged(changed)
        assert (found.level, found.area) == (level, "GPU 0")
        assert clause in found.what
        assert found.level == NOTE or found.fix or "waits" in found.what

    check_cases(FAULTS, check)


@pytest.mark.parametrize(
    "changed",
    [
        {"Clocks Event Reasons/SW Power Cap": "Active"},
        {"Clocks Event Reasons/Idle": "Not Active"},
        {"Clocks Event Reasons Counters/SW Power Capping": "33921903067 us"},
        {"FB Memory Usage/Used": "570 MiB"},
        {"PCI/GPU Link Info/PCIe Generation/Current": "1"},
        {"ECC Errors/Volatile/DRAM Correctable": "177"},
        {"Product Brand": "GeForce", "ECC Mode/Current": "N/A", "Persistence Mode": "Disabled"},
        {name: "N/A" for name in fields(0) if name != "Product Name"},
    ],
    ids=["capped", "busy", "was capped", "a desktop", "idle link", "corrected", "GeForce", "vGPU"],
)
def test_normal_values_are_no_fault(changed):
    assert [found.level for found in judged(changed)] == [OK]


def test_memory_errors_are_a_problem_unless_the_driver_needs_no_recovery():
    errors = {"ECC Errors/Volatile/SRAM Uncorrectable Parity": "3"}
    (well,) = judged(errors)
    (unknown,) = judged({**errors, "GPU Recovery Action": "N/A"})
    assert (well.level, unknown.level) == (NOTE, PROBLEM)
    assert "3 uncorrectable memory errors" in unknown.what
    assert "SRAM Uncorrectable Parity: 3" in unknown.detail


def test_a_problem_of_another_jobs_gpu_is_a_note():
    other = judged({"GPU Recovery Action": "Reset"}, mine=["GPU-of-ours"])
    own = judged({"GPU Recovery Action": "Reset"}, mine=[fields(0)["GPU UUID"]])
    assert [found.level for found in other] == [NOTE]
    assert "not visible to your job" in other[0].what
    assert [found.level for found in own] == [PROBLEM]


@pytest.mark.parametrize(
    ("used", "processes", "level", "clause"),
    [
        (70000, [(71, 69000, "python3")], PROBLEM, "pid 71"),
        (2000, [(71, 1900)], NOTE, "pid 71"),
        (70000, [], PROBLEM, "by no process that is visible here"),
        (70000, [(71, 30000)], PROBLEM, "40000 MiB by no process"),
    ],
    ids=["a job", "a small one", "another container", "both"],
)
def test_taken_memory_is_reported_with_its_processes(used, processes, level, clause):
    changed = {"FB Memory Usage/Used": f"{used} MiB", "Processes": ""}
    (found,) = judged(changed, processes={0: processes})
    assert (found.level, clause in found.detail) == (level, True), found


def test_values_that_are_no_counts_are_no_finding():
    wrong = {"ECC Errors/Volatile/DRAM Uncorrectable": "-3", "FB Memory Usage/Used": "-1 MiB"}
    width = {"PCI/GPU Link Info/Link Width/Current": "-16x"}
    assert [f.level for f in judged({**wrong, **width})] == [OK]
