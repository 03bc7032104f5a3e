"""What doctor makes of driver, torch and GPUs together, and of a driver that does not answer."""

import time
from dataclasses import replace

import pytest
from cases import check_cases, with_limits
from fake_nvml import FILES, answer, bus, gpu

from saferun.doctor.checks import checks_driver
from saferun.doctor.collect import nvidia
from saferun.doctor.vitals import Cuda, Files, Torch
from saferun.gpu.nvml import LIBRARY, Lost, NvmlAnswer
from saferun.model import NOTE, OK, PROBLEM
from saferun.system import command as bounded

# driver and torch


TORCH = Torch("torchrun", python="3.11", torch="2.9.1", cuda="12.8", archs=("sm_90",))
WITH_CUDA = {  # what torch was built with, what libcuda supports (0: there is none, so NVML says)
    "newer": ("12.8", 13000, OK, "has CUDA 13.0"),
    "newer, by NVML": ("12.8", 0, OK, "has CUDA 13.0"),
    "major too old": ("13.0", 12080, PROBLEM, "too old"),
    "minor too old": ("12.8", 12040, NOTE, "has CUDA 12.4"),
}
OF_THE_RIGHT_KIND = {
    "fits": (TORCH, True, OK),
    "CPU build with GPUs": (replace(TORCH, cuda=None), True, PROBLEM),
    "CPU build without": (replace(TORCH, cuda=None), False, OK),
    "none": (Torch(trouble="there is no torchrun"), True, PROBLEM),
    "slow disk": (Torch("torchrun", unknown="it did not end within 15 s"), True, NOTE),
}


def test_the_driver_must_support_the_cuda_of_torch():
    def check(build, driver, level, clause):
        known = Cuda(driver=driver), replace(TORCH, cuda=build)
        found = [f for f in checks_driver.versions(FILES, answer(1), *known) if f.area == "driver"]
        assert [(f.level, clause in f.what) for f in found] == [(level, True)], found
        assert level != PROBLEM or "580" in found[0].fix

    check_cases(WITH_CUDA, check)


def test_torch_must_be_there_and_of_the_right_kind():
    def check(torch, gpus, level):
        known = answer(1) if gpus else NvmlAnswer()
        every = checks_driver.versions(Files(), known, Cuda(), torch)
        (found,) = [f for f in every if f.area == "torch"]
        slow = "python -c 'import torch'"  # a torchrun that is another program's is not the reason
        assert (found.level, slow in found.fix) == (level, "did not end" in found.what)

    check_cases(OF_THE_RIGHT_KIND, check)


RUNS = {
    ("9.0", "sm_80 sm_90"): "sm_90",
    ("8.9", "sm_80 sm_86 sm_90"): "sm_80",
    ("8.6", "sm_90"): "no",
    ("12.0", "sm_90 compute_90"): "jit",
    ("9.0", "sm_90a"): "sm_90a",
    ("10.3", "sm_100a"): "no",
    ("10.3", "sm_100f"): "sm_100f",
    ("7.0", "sm_75 sm_80 compute_90"): "no",
    ("12.1", "compute_100a"): "no",
}


def test_torch_must_have_code_for_the_gpus():
    assert {(c, a): checks_driver.how_it_runs(c, tuple(a.split())) for c, a in RUNS} == RUNS
    seen = answer(1, capabilities={bus(0): "9.0"})
    for archs, level in (("sm_90", OK), ("sm_80 compute_80", NOTE), ("sm_100", PROBLEM)):
        torch = replace(TORCH, archs=tuple(archs.split()))
        assert [f.level for f in checks_driver.architectures(seen, Cuda(), torch)] == [level]
    assert not list(checks_driver.architectures(seen, Cuda(), replace(TORCH, archs=())))


# a driver that does not answer


def asked(nvml, *, known=(), end_s=300.0):
    environ = {"LD_LIBRARY_PATH": str(nvml.folder)}
    return nvidia.ask_nvml(environ, known, time.monotonic() + end_s)


FAILURES = {
    "mismatch": ({"Init_v2": "!18"}, "reboot"),
    "not loaded": ({"Init_v2": "!9"}, "modprobe"),
    "no devices": ({"GetCount_v2": "0"}, "--gpus all"),
    "permission": ({"Init_v2": "!4"}, "groups"),
    "bus": ({"Init_v2": "!15"}, "reboot"),
    "power": ({"Init_v2": "!8"}, "attached"),
    "another status": ({"Init_v2": "!999"}, "by hand"),
    "dies": ({"Init_v2": "crash"}, "by hand"),
}


def test_each_way_in_which_nvml_fails_has_a_fix(nvml):
    def check(behaviour, fix):
        nvml.reports(**behaviour)
        (found,) = checks_driver.presence(FILES, asked(nvml), Cuda())
        assert (found.level, fix in found.fix) == (PROBLEM, True), found

    check_cases(FAILURES, check)


def test_a_library_that_cannot_be_used_is_a_note(nvml):
    nvml.reports(Init_v2="!9")
    (found,) = checks_driver.presence(Files(), asked(nvml), Cuda())  # a machine without GPUs
    assert (found.level, found.what) == (NOTE, "the driver is not loaded")
    (nvml.folder / LIBRARY).unlink()
    (nvml.folder / LIBRARY).write_text("no library", encoding="utf-8")
    (found,) = checks_driver.presence(FILES, asked(nvml), Cuda())
    assert found.what == f"{LIBRARY} cannot be loaded: the GPUs' health cannot be read"
    assert (found.level, "utility" in found.fix) == (NOTE, True)


HUNG = "it did not end within 6 s"
SILENT = {  # the answer; of the finding that counts: area, level, what is in its text
    "it hangs": (NvmlAnswer(LIBRARY, status=None, trouble=HUNG), "driver", PROBLEM, "did not end"),
    "its child cannot be started": (
        *(NvmlAnswer(LIBRARY, status=None, trouble="cannot be run (Exec format error)"), "driver"),
        *(PROBLEM, "by hand"),
    ),
    "one GPU hangs": (
        *(answer(1, status=None, trouble=HUNG, silent=(bus(1),)), f"GPU at {bus(1)}"),
        *(PROBLEM, "the others do"),
    ),
    "each GPU answers alone": (answer(2, status=None, trouble=HUNG), *("driver", NOTE, "-pm 1")),
}


def test_what_does_not_answer_is_named():
    def check(seen, area, level, clause):
        found = {f.area: f for f in checks_driver.presence(FILES, seen, Cuda())}[area]
        assert (found.level, clause in f"{found.what} {found.fix}") == (level, True), found

    check_cases(SILENT, check)


def test_a_gpu_whose_information_memory_is_corrupted_is_a_problem_beside_its_report(nvml):
    nvml.reports(gpu(0), gpu(1, ValidateInforom="!14"))
    seen = asked(nvml)
    (found,) = checks_driver.presence(FILES, seen, Cuda())
    assert (found.level, "replaced" in found.fix, len(seen.report.cards)) == (PROBLEM, True, 2)


def test_a_lost_gpu_is_named_by_its_number_and_the_others_are_kept(nvml):
    for why in ("15", "999"):  # lost, and for a reason that nobody knows
        nvml.reports(gpu(0), gpu(1, GetHandle=f"!{why}"), gpu(2))
        seen = asked(nvml, known=[bus(n) for n in range(3)])
        (found,) = checks_driver.presence(FILES, seen, Cuda())
        assert (found.area, found.level, found.detail) == ("GPU 1", PROBLEM, bus(1))
        assert seen.report.numbers() == {bus(n): n for n in range(3)}
        assert seen.peers == {(0, 2): "OK", (2, 0): "OK"}
    nvml.reports(gpu(0, GetHandle="!15"))  # the only one
    found = {f.area: f for f in checks_driver.presence(FILES, asked(nvml), Cuda())}
    assert "GPU is lost" in found["GPU 0"].what


def test_gpus_that_were_not_given_to_this_container_are_none(nvml):
    nvml.reports(gpu(0, GetHandle="!4"), gpu(1))
    seen = asked(nvml)
    assert ([card.bus for card in seen.report.cards], seen.report.lost) == ([bus(1)], ())
    assert [f.level for f in checks_driver.presence(FILES, seen, Cuda())] == [OK]


def test_a_machine_without_a_driver_differs_from_one_without_gpus():
    for files, level, clause in (
        (Files(), NOTE, "no NVIDIA driver"),
        (Files(amd=True), NOTE, "AMD GPUs"),
        (Files(pci=8), PROBLEM, "8 NVIDIA GPUs on the PCI bus, and no driver"),
        (Files(nodes={"nvidiactl": "ok"}), PROBLEM, "neither NVML nor /proc/driver/nvidia"),
    ):
        (found,) = checks_driver.presence(files, NvmlAnswer(), Cuda())
        assert (found.level, clause in found.what) == (level, True)


# what the driver shows in files


def written(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def seen_in(root):
    return nvidia.driver_files(*(str(root / name) for name in ("proc", "dev", "tasks", "pci")))


INFORMATION = "Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n"
KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Mon\n"
BUS = [  # vendor, class and driver of what is there; two are GPUs that this system may use
    ("0x10de", "0x030200", None),
    ("0x10de", "0x030000", "nvidia"),
    ("0x10de", "0x030000", "vfio-pci"),
    ("0x10de", "0x040300", None),  # its sound
    ("0x1002", "0x030000", None),
]


def test_the_drivers_files_are_read(tmp_path):
    assert seen_in(tmp_path) == Files()
    written(tmp_path, {"dev/nvidiactl": ""})  # nodes alone, where /proc shows nothing
    assert seen_in(tmp_path).nodes == {"nvidiactl": "ok", "nvidia-uvm": "missing"}
    written(
        tmp_path,
        {
            "proc/version": KERNEL,
            "proc/gpus/0000:1a:00.0/information": INFORMATION,
            "dev/nvidia0": "",
            "tasks/71/comm": "nv-fabricmanage\n",
            "pci/0000:1a:00.0/numa_node": "1\n",
        },
    )
    for number, (vendor, kind, driver) in enumerate(BUS):
        base = f"pci/0000:0{number}:00.0"
        written(tmp_path, {f"{base}/vendor": vendor + "\n", f"{base}/class": kind + "\n"})
        if driver:
            (tmp_path / base / "driver").symlink_to(f"/drivers/{driver}")
    seen = seen_in(tmp_path)
    assert (seen.version, seen.gpus, seen.manager) == ("580.95.05", {bus(0): "NVIDIA H200"}, True)
    assert seen.nodes == {"nvidiactl": "ok", "nvidia-uvm": "missing", "nvidia0": "ok"}
    assert (seen.numa, seen.pci) == ({bus(0): 1}, 2)
    written(tmp_path, {"pci/0000:1a:00.0/numa_node": "-1\n"})  # the kernel knows of none
    assert seen_in(tmp_path).numa == {}


def test_each_gpu_is_asked_alone_if_the_whole_report_does_not_come(nvml, monkeypatch):
    monkeypatch.setattr(nvidia, "REPORT_S", 0.3)
    nvml.reports(gpu(0), gpu(1, GetName="hang"), gpu(2, GetHandle="!15"))

    def alone(limit_s):
        monkeypatch.setattr(nvidia, "ALONE_S", limit_s)
        return asked(nvml, known=(bus(0), bus(1), bus(2)))

    with bounded.questions():  # as doctor asks them: an earlier examination has closed the door
        seen = with_limits(alone, lambda seen: bool(seen.report.cards))
    assert seen.silent == (bus(1),)
    assert seen.report.lost == (Lost(bus(2), "GPU is lost", 2),)
    assert [card.bus for card in seen.report.cards] == [bus(0)]


NODES = dict(FILES.nodes)


@pytest.mark.parametrize(
    ("nodes", "levels", "clause"),
    [
        (NODES, [OK], "present"),
        ({**NODES, "nvidia-uvm": "missing"}, [PROBLEM], "nvidia-uvm is missing"),
        ({**NODES, "nvidiactl": "closed"}, [PROBLEM], "may not open /dev/nvidiactl"),
        ({**NODES, "nvidia1": "closed"}, [NOTE], "/dev/nvidia1"),
        ({**NODES, "nvidia0": "closed", "nvidia1": "closed"}, [PROBLEM], "/dev/nvidia0"),
        ({**NODES, "nvidia0": "missing", "nvidia1": "missing"}, [PROBLEM], "no GPU is given"),
        ({}, [], ""),
    ],
)
def test_the_device_nodes_must_be_there_and_open(nodes, levels, clause):
    found = [*checks_driver.nodes(replace(FILES, nodes=nodes))]
    assert [f.level for f in found] == levels
    assert all(clause in f.what for f in found)
