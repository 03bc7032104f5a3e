"""What doctor makes of NVML's answers about each GPU."""

import time

import pytest
from cases import check_cases
from fake_nvml import FILES, MIB, RESERVED_MIB, TOTAL_MIB, Nvml, gpu
from fakecuda import uuid

from saferun.doctor.checks import checks_gpu
from saferun.doctor.collect import nvidia
from saferun.model import NOTE, OK, PROBLEM


@pytest.fixture
def judged(nvml: Nvml):
    """Return what is found of one GPU, some of whose answers differ."""

    def judged(changed=None, mine=(), **more):
        nvml.reports(gpu(0, **more, **(changed or {})))
        environ = {"LD_LIBRARY_PATH": str(nvml.folder)}
        return checks_gpu.judge(nvidia.ask_nvml(environ, (), time.monotonic() + 300), FILES, mine)

    return judged


def test_a_healthy_gpu_is_one_finding(judged):
    (found,) = judged()
    assert (found.level, found.area) == (OK, "GPU 0")
    assert "H200" in found.what


OLD = {"value.230": "!2"}  # before 565
SRAM = "0 0 0 {parity} 0 0 0 0 0 0 0 {exceeded}"
FAULTS = {
    "recovery action": ({"value.230": "1"}, PROBLEM, "asks for: Reset"),
    "reboot": ({"value.230": "2"}, PROBLEM, "asks for: Reboot"),
    "drain and reset": ({"value.230": "4"}, PROBLEM, "asks for: Drain and Reset"),
    "reset required": ({**OLD, "value.226": "1"}, PROBLEM, "asks for: Reset"),
    "drain": ({**OLD, "value.227": "1"}, PROBLEM, "asks for: Drain and Reset"),
    "remap pending": ({"GetRemappedRows": "0 0 1 0"}, PROBLEM, "waits to be replaced"),
    "remap failed": ({"GetRemappedRows": "0 0 0 1"}, PROBLEM, "could not be replaced"),
    "rows remapped": ({"GetRemappedRows": "1 2 0 0"}, NOTE, "2 bad rows"),
    "pages retired": ({"GetRetiredPages": "3"}, NOTE, "3 bad pages"),
    "page pending": ({"GetRetiredPagesPendingStatus": "1"}, PROBLEM, "bad page"),
    "channel repair": ({"GetRepairStatus": "1 0"}, PROBLEM, "memory channel"),
    "TPC repair": ({"GetRepairStatus": "0 1"}, PROBLEM, "part of the processor"),
    "unrepairable": ({"GetUnrepairableMemoryFlag_v1": "1"}, PROBLEM, "cannot be repaired"),
    "SRAM threshold": (
        {"GetSramEccErrorStatus": SRAM.format(parity=0, exceeded=1)},
        PROBLEM,
        "more SRAM errors",
    ),
    "errors once": ({"GetMemoryErrorCounter.1.1.2": "7"}, NOTE, "7 uncorrectable"),
    "ECC off": ({"GetEccMode": "0 0"}, NOTE, "is off"),
    "ECC changes": ({"GetEccMode": "1 0"}, NOTE, "after the next reset"),
    "slow": ({"GetCurrentClocksEventReasons": f"{0x08}"}, PROBLEM, "at least halved"),
    "hot": ({"GetCurrentClocksEventReasons": f"{0x08 | 0x40}"}, PROBLEM, "too hot"),
    "hot, before 535": (
        {"GetCurrentClocksEventReasons": "!13", "GetCurrentClocksThrottleReasons": f"{0x40}"},
        PROBLEM,
        "too hot",
    ),
    "power brake": ({"GetCurrentClocksEventReasons": f"{0x80}"}, PROBLEM, "power supply"),
    "slowed by the driver": (
        {"GetCurrentClocksEventReasons": f"{0x20}"},
        NOTE,
        "temperature limit",
    ),
    "was hot": ({"value.270": "600000000000"}, NOTE, "10 min (heat)"),
    "was braked": ({"value.271": "600000000000"}, NOTE, "10 min (power)"),
    "MIG": ({"GetMigMode": "1 1"}, NOTE, "cut by MIG"),
    "exclusive": ({"GetComputeMode": "3"}, NOTE, "one process"),
    "prohibited": ({"GetComputeMode": "2"}, PROBLEM, "Prohibited"),
    "fewer lanes": ({"GetCurrPcieLinkWidth": "4"}, NOTE, "4 of 16 lanes"),
    "no persistence": ({"GetPersistenceMode": "0"}, NOTE, "persistence mode is off"),
    "fabric not started": ({"GetGpuFabricInfoV": "3 0 1 0"}, PROBLEM, "error 802"),
    "fabric starting": ({"GetGpuFabricInfoV": "3 0 2 0"}, PROBLEM, "not ready"),
    "fabric starting, before 570": ({"GetGpuFabricInfoV": "2 0 2 0"}, PROBLEM, "not ready"),
    "fabric failed": ({"GetGpuFabricInfoV": "3 999 3 0"}, PROBLEM, "with: Unknown Error"),
    "fabric unhealthy": ({"GetGpuFabricInfoV": "3 0 3 2"}, PROBLEM, "health: Unhealthy"),
    "lost": ({"GetTemperatureV": "!15"}, PROBLEM, "Current Temp: GPU is lost"),
    "unknown": ({"GetEccMode": "!999"}, PROBLEM, "does not answer: ECC Mode, Current: Unknown"),
}


def test_each_fault_in_the_answers_is_one_finding(judged):
    def check(changed, level, clause):
        (found,) = judged(changed)
        assert (found.level, found.area) == (level, "GPU 0")
        assert clause in found.what
        assert found.level == NOTE or found.fix or "waits" in found.what

    check_cases(FAULTS, check)


GEFORCE = {"GetName": "NVIDIA GeForce RTX 4090", "GetEccMode": "0 0", "GetPersistenceMode": "0"}


def test_normal_values_are_no_fault(judged):
    for changed in (
        {"GetCurrentClocksEventReasons": f"{0x04}"},  # capped
        {"GetCurrentClocksEventReasons": "0"},
        {"used": 570},  # a desktop
        GEFORCE,
        {name: "!3" for name in gpu() if name != "GetPciInfo_v3"},  # nothing is supported
        {name: "!4" for name in gpu() if name != "GetPciInfo_v3"},  # nothing is allowed
    ):
        assert [found.level for found in judged(**changed)] == [OK], changed


def test_memory_errors_are_a_problem_unless_the_driver_needs_no_recovery(judged):
    errors = {"GetSramEccErrorStatus": SRAM.format(parity=3, exceeded=0)}
    (well,) = judged(errors)
    (unknown,) = judged({**errors, **OLD})
    assert (well.level, unknown.level) == (NOTE, PROBLEM)
    assert "3 uncorrectable memory errors" in unknown.what
    assert "SRAM Uncorrectable Parity: 3" in unknown.detail
    older = {"GetSramEccErrorStatus": "!13", "GetMemoryErrorCounter.1.0.7": "5"}
    assert "SRAM Uncorrectable: 5" in judged(older)[0].detail


def test_a_problem_of_another_jobs_gpu_is_a_note(judged):
    other = judged({"value.230": "1"}, mine=["GPU-of-ours"])
    own = judged({"value.230": "1"}, mine=[uuid(0)])
    assert [found.level for found in other] == [NOTE]
    assert "not visible to your job" in other[0].what
    assert [found.level for found in own] == [PROBLEM]


def test_taken_memory_is_reported_with_its_processes(judged):
    for used, processes, level, clause in (
        (70000, f"71 {69000 * MIB}", PROBLEM, "pid 71"),
        (2000, f"71 {1900 * MIB}", NOTE, "pid 71"),
        (70000, "", PROBLEM, "by no process that is visible here"),
        (70000, f"71 {30000 * MIB}", PROBLEM, "40000 MiB by no process"),
    ):
        (found,) = judged({"GetComputeRunningProcesses_v3": processes}, used=used)
        assert (found.level, clause in found.detail) == (level, True), found
    sizes = (TOTAL_MIB, TOTAL_MIB - RESERVED_MIB - 70000, RESERVED_MIB + 70000)
    old = {"GetMemoryInfo_v2": "!25", "GetMemoryInfo": " ".join(str(n * MIB) for n in sizes)}
    (found,) = judged(old)  # an older driver counts its own memory as used
    assert "70620 of 143771 MiB" in found.what
