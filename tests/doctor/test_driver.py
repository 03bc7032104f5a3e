"""What doctor makes of driver, torch and GPUs together, and of a driver that does not answer."""

from __future__ import annotations

import time

import pytest
from cases import with_limits
from fake_smi import FILES, bus, fields, program, report, reported

from saferun.doctor.checks import checks_driver
from saferun.doctor.collect import nvidia
from saferun.doctor.vitals import Cuda, Files, Smi, Torch
from saferun.gpu import nvidia_smi
from saferun.model import NOTE, OK, PROBLEM
from saferun.system import command as bounded

# driver and torch


TORCH = Torch("torchrun", python="3.11", torch="2.9.1", cuda="12.8", archs=("sm_90",))


@pytest.mark.parametrize(
    ("build", "driver", "level", "clause"),
    [
        ("12.8", 13000, OK, "has CUDA 13.0"),
        ("13.0", 12080, PROBLEM, "too old"),
        ("12.8", 12040, NOTE, "has CUDA 12.4"),
        ("12.8", 12080, OK, "has CUDA 12.8"),
        ("11.8", 13000, OK, "has CUDA 13.0"),
    ],
    ids=["newer", "major too old", "minor too old", "the same", "older build"],
)
def test_the_driver_must_support_the_cuda_of_torch(build, driver, level, clause):
    cuda = Cuda(driver=driver)
    torch = TORCH._replace(cuda=build)
    found = [
        f
        for f in checks_driver.versions(FILES, reported(fields(0)), cuda, torch)
        if f.area == "driver"
    ]
    assert [(f.level, clause in f.what) for f in found] == [(level, True)], found
    assert level != PROBLEM or "580" in found[0].fix


def test_without_libcuda_the_version_of_nvidia_smi_counts():
    found = [*checks_driver.versions(FILES, reported(fields(0)), Cuda(), TORCH)]
    assert any("has CUDA 13.0" in f.what for f in found)


@pytest.mark.parametrize(
    ("torch", "gpus", "level"),
    [
        (TORCH, True, OK),
        (TORCH._replace(cuda=None), True, PROBLEM),
        (TORCH._replace(cuda=None), False, OK),
        (Torch(trouble="there is no torchrun"), True, PROBLEM),
        (Torch("torchrun", "ImportError: libcudart.so.12"), True, PROBLEM),
        (Torch("torchrun", unknown="it did not end within 15 s"), True, NOTE),
    ],
    ids=["fits", "CPU build with GPUs", "CPU build without", "none", "broken", "slow disk"],
)
def test_torch_must_be_there_and_of_the_right_kind(torch, gpus, level):
    smi_told = reported(fields(0)) if gpus else Smi()
    found = [*checks_driver.versions(Files(), smi_told, Cuda(), torch)]
    assert [f.level for f in found if f.area == "torch"] == [level]
    slow = "python -c 'import torch'"  # a torchrun that is another program's is not the reason
    assert all((slow in f.fix) == ("did not end" in f.what) for f in found if f.area == "torch")


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ("9.0", "sm_80 sm_90", "sm_90"),
        ("8.9", "sm_80 sm_86 sm_90", "sm_80"),
        ("8.6", "sm_90", "no"),
        ("12.0", "sm_80 sm_90", "no"),
        ("12.0", "sm_90 compute_90", "jit"),
        ("9.0", "sm_90a", "sm_90a"),
        ("10.3", "sm_100", "sm_100"),
        ("10.3", "sm_100a", "no"),
        ("10.3", "sm_100f", "sm_100f"),
        ("7.0", "sm_75 sm_80 compute_90", "no"),
        ("7.5", "sm_70", "sm_70"),
        ("12.1", "compute_100a", "no"),
    ],
)
def test_which_code_runs_on_which_gpu(capability, archs, runs):
    assert checks_driver.how_it_runs(capability, tuple(archs.split())) == runs


@pytest.mark.parametrize(
    ("archs", "level"),
    [(("sm_90",), OK), (("sm_80", "compute_80"), NOTE), (("sm_100",), PROBLEM), ((), None)],
    ids=["code", "PTX only", "none", "unknown"],
)
def test_torch_must_have_code_for_the_gpus(archs, level):
    seen = reported(fields(0), capabilities={bus(0): "9.0"})
    found = checks_driver.architectures(seen, Cuda(), TORCH._replace(archs=archs))
    assert [f.level for f in found] == ([level] if level else [])


# a driver that does not answer


def failed(messages, status=255, **changed):
    read = nvidia_smi.parse(messages)
    return Smi("/usr/bin/nvidia-smi", read, status, f"exit status {status}", messages, **changed)


SAYINGS = {
    "mismatch": ("Failed to initialize NVML: Driver/library version mismatch", 18, "reboot"),
    "not loaded": (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        9,
        "modprobe",
    ),
    "no devices": ("No devices were found", 6, "--gpus all"),
    "no library": (
        "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system",
        12,
        "utility",
    ),
    "permission": ("Failed to initialize NVML: Insufficient Permissions", 4, "groups"),
    "bus": ("Error", 15, "reboot"),
    "power": ("Error", 8, "attached"),
    "infoROM": ("Error", 14, "replaced"),
    "garbage": ("index,name\x01", 1, "by hand"),
}


@pytest.mark.parametrize("name", SAYINGS)
def test_each_message_of_a_failing_nvidia_smi_has_a_fix(name):
    messages, status, fix = SAYINGS[name]
    (found,) = checks_driver.presence(FILES, failed(messages, status), Cuda())
    assert (found.level, fix in found.fix) == (PROBLEM, True), found


def test_an_nvidia_smi_that_prints_nothing_and_exits_with_0_is_a_finding():
    silent = Smi("/opt/nvidia-smi")
    (found,) = checks_driver.presence(FILES, silent, Cuda())
    assert found.level == NOTE
    assert "/opt/nvidia-smi" in found.detail


def test_a_hanging_nvidia_smi_is_a_problem():
    hung = Smi("/usr/bin/nvidia-smi", status=None, trouble="it did not end within 6 s")
    found = [*checks_driver.presence(FILES, hung, Cuda())]
    assert (found[0].level, "did not end" in found[0].what) == (PROBLEM, True)


@pytest.mark.parametrize(
    "trouble", ["cannot be run (Exec format error)", "it wrote more than 8 MiB"]
)
def test_a_program_that_is_not_nvidia_smi_is_not_reported_as_hanging(trouble):
    broken = Smi("/opt/nvidia-smi", status=None, trouble=trouble, message="y" * 300)
    (found,) = checks_driver.presence(FILES, broken, Cuda())
    assert (found.level, "by hand" in found.fix, len(found.detail) < 100) == (PROBLEM, True, True)


def test_a_message_beside_a_report_is_kept_without_the_report(tmp_path):
    (tmp_path / "q.txt").write_text(report([fields(0)]))
    complaint = "WARNING: infoROM is corrupted at gpu 0000:1A:00.0"
    program(tmp_path, {"-q": f"cat {tmp_path}/q.txt; echo '{complaint}' >&2; exit 14"})
    seen = nvidia.ask_smi({"PATH": f"{tmp_path}:/bin"}, (), time.monotonic() + 10)
    assert seen.message == complaint
    assert len(seen.report.cards) == 1


def test_the_only_gpu_that_hangs_is_named():
    hung = reported(fields(0), status=None, trouble="it did not end within 6 s", silent=(bus(1),))
    found = {f.area: f for f in checks_driver.presence(FILES, hung, Cuda())}
    assert found[f"GPU at {bus(1)}"].level == PROBLEM


def test_a_lost_gpu_is_named_by_its_number():
    messages = f"Unable to determine the device handle for GPU1: {bus(1)}: Unknown Error\n"
    read = nvidia_smi.parse(messages + report([fields(0)]))
    lost = Smi("/usr/bin/nvidia-smi", read, 15, "exit status 15")
    (found,) = checks_driver.presence(FILES, lost, Cuda())
    assert (found.area, found.level, found.detail) == ("GPU 1", PROBLEM, bus(1))


def test_a_slow_nvidia_smi_is_a_note_where_each_gpu_answers_alone():
    slow = reported(fields(0), fields(1), status=None, trouble="it did not end within 8 s")
    (found,) = checks_driver.presence(FILES, slow, Cuda())
    assert (found.level, "-pm 1" in found.fix) == (NOTE, True)


@pytest.mark.parametrize(
    ("files", "level", "clause"),
    [
        (Files(), NOTE, "no NVIDIA driver"),
        (Files(amd=True), NOTE, "AMD GPUs"),
        (Files(pci=8), PROBLEM, "8 NVIDIA GPUs on the PCI bus, and no driver"),
        (Files(nodes={"nvidiactl": "ok"}), PROBLEM, "neither nvidia-smi nor /proc/driver/nvidia"),
    ],
    ids=["nothing", "AMD", "no driver", "nodes alone"],
)
def test_a_machine_without_a_driver_differs_from_one_without_gpus(files, level, clause):
    (found,) = checks_driver.presence(files, Smi(), Cuda())
    assert (found.level, clause in found.what) == (level, True)


# what the driver shows in files


def written(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def seen_in(root):
    return nvidia.driver_files(*(str(root / name) for name in ("proc", "dev", "tasks", "pci")))


INFORMATION = "Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n"
KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Mon\n"


def test_the_drivers_files_are_read(tmp_path):
    written(
        tmp_path,
        {
            "proc/version": KERNEL,
            "proc/gpus/0000:1a:00.0/information": INFORMATION,
            "dev/nvidiactl": "",
            "dev/nvidia0": "",
            "tasks/71/comm": "nv-fabricmanage\n",
        },
    )
    seen = seen_in(tmp_path)
    assert (seen.version, seen.gpus, seen.manager) == ("580.95.05", {bus(0): "NVIDIA H200"}, True)
    assert seen.nodes == {"nvidiactl": "ok", "nvidia-uvm": "missing", "nvidia0": "ok"}


def test_gpus_are_counted_on_the_bus_without_those_of_virtual_machines(tmp_path):
    for number, (vendor, kind, driver) in enumerate(
        [
            ("0x10de", "0x030200", None),
            ("0x10de", "0x030000", "nvidia"),
            ("0x10de", "0x030000", "vfio-pci"),
            ("0x10de", "0x040300", None),  # its sound
            ("0x1002", "0x030000", None),
        ]
    ):
        base = f"pci/0000:0{number}:00.0"
        written(tmp_path, {f"{base}/vendor": vendor + "\n", f"{base}/class": kind + "\n"})
        if driver:
            (tmp_path / base / "driver").symlink_to(f"/drivers/{driver}")
    assert seen_in(tmp_path).pci == 2


def test_device_nodes_are_seen_where_the_drivers_files_are_not_shown(tmp_path):
    written(tmp_path, {"dev/nvidiactl": ""})
    assert seen_in(tmp_path).nodes == {"nvidiactl": "ok", "nvidia-uvm": "missing"}


def test_an_empty_machine_shows_nothing(tmp_path):
    assert seen_in(tmp_path) == Files()


def test_each_gpu_is_asked_alone_if_the_whole_report_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "REPORT_S", 0.3)
    (tmp_path / "one.txt").write_text(report([fields(0)]))
    answers = {f"-q -i {bus(0)}": f"cat {tmp_path}/one.txt"}
    program(tmp_path, answers, "exec sleep 30")
    environ = {"PATH": f"{tmp_path}:/bin"}

    def asked(limit_s):
        monkeypatch.setattr(nvidia, "ALONE_S", limit_s)
        return nvidia.ask_smi(environ, (bus(0), bus(1)), time.monotonic() + 300)

    with bounded.questions():  # as doctor asks them: an earlier examination has closed the door
        seen = with_limits(asked, lambda seen: bool(seen.report.cards))
    assert seen.silent == (bus(1),)
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
    ids=["all", "uvm", "control", "one of two", "every GPU", "container", "no driver"],
)
def test_the_device_nodes_must_be_there_and_open(nodes, levels, clause):
    found = [*checks_driver.nodes(FILES._replace(nodes=nodes))]
    assert [f.level for f in found] == levels
    assert all(clause in f.what for f in found)
