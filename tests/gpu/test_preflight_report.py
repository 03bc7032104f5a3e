"""What is made of the test of the GPUs: findings, fixes, and the value that leaves bad ones out."""

import pytest
from fakecuda import THREE, A, B, C, problems, uuid

from saferun.gpu.device_names import visible_without
from saferun.gpu.preflight import preflight_report
from saferun.model import NOTE, OK, PROBLEM, Gpu, GpuFacts


def device(number, **reported):
    known = {"uuid": uuid(number), "pci": f"0000:{0x1A + number:02x}:00.0", "name": "Fake"}
    return {str(number): {**known, "good": True, "step": "release", **reported}}


def document(*devices, **reported):
    merged = {key: value for one in devices for key, value in one.items()}
    return {"ended": "done", "step": "end", "code": 0, "devices": merged, "output": "", **reported}


def test_a_bad_gpu_is_named_by_number_uuid_address_error_and_fix():
    failed = device(1, good=False, step="read", code=214, error="CUDA_ERROR_ECC_UNCORRECTABLE")
    judged = preflight_report.judge(document(device(0), failed, device(2)), THREE, 20)
    (line, leave_out) = preflight_report.lines(judged)
    for word in ("GPU 1", B, "0000:1b:00.0", "CUDA_ERROR_ECC_UNCORRECTABLE (214)", f"-i {B}"):
        assert word in line
    assert "read back" in line
    assert leave_out.endswith("CUDA_VISIBLE_DEVICES=GPU-11111111,GPU-33333333")
    assert judged.asks == {"reset": (B,)}


@pytest.mark.parametrize(
    ("reported", "word"),
    [
        ({"code": 802}, "fabric manager"),
        ({"code": 803}, "reboot after a driver update"),
        ({"code": 999}, "nvidia_uvm"),
        ({"code": 999, "nodes": {"/dev/nvidia-uvm": "missing"}}, "nvidia-modprobe -u"),
        ({"code": 999, "nodes": {"/dev/nvidiactl": "closed"}}, "/dev/nvidiactl"),
        ({"code": 101}, "CUDA_VISIBLE_DEVICES with nvidia-smi -L"),
        ({"code": 101, "visible": "7"}, "CUDA_VISIBLE_DEVICES='7'"),
        ({"code": 100, "nodes": {"/dev/nvidiactl": "missing"}}, "--gpus all"),
        ({"code": 100, "visible": ""}, "CUDA_VISIBLE_DEVICES=''"),
        ({"code": 34}, "stubs"),
        ({"code": 804}, "compat"),
        ({"code": 4711}, "dmesg"),
        ({"missing": "no such file", "proc": True}, "NVIDIA_DRIVER_CAPABILITIES"),
        ({"missing": "no such file", "kfd": True}, "AMD"),
        ({"missing": "no such file"}, "install NVIDIA's driver"),
        ({"visible": "9", "count": 0}, "CUDA_VISIBLE_DEVICES='9'"),
        ({"ended": "timeout", "step": "init", "left": 4711}, "reboot"),
        ({"ended": "crash", "signal": 11, "step": "init"}, "LD_LIBRARY_PATH"),
        ({"ended": "flood", "step": "init"}, "LD_LIBRARY_PATH"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_stops_all_gpus_has_its_fix(reported, word):
    judged = preflight_report.judge(document(**reported), THREE, 20)
    (finding,) = judged.findings
    assert finding.level == PROBLEM
    assert word in finding.fix


def test_memory_that_is_held_names_who_holds_it():
    failed = device(0, good=False, step="memory", code=2)
    around = preflight_report.Around(holders={A: "pid 4711 (python, 70000 MiB)"})
    judged = preflight_report.judge(
        document(failed), THREE._replace(gpus=THREE.gpus[:1]), 20, around
    )
    (finding,) = problems(judged)
    assert finding.fix.startswith("held by pid 4711 (python, 70000 MiB); ")
    assert set(judged.asks) == {"leftovers", "drain"}


@pytest.mark.parametrize("visible", [None, "0,1,2"])
def test_a_gpu_that_cuda_does_not_show_is_missed_and_left_out(visible):
    judged = preflight_report.judge(document(device(0), device(2), visible=visible), THREE, 20)
    (finding,) = problems(judged)
    assert (finding.area, B in finding.what) == ("GPU 1", True)
    assert judged.findings[-1].what.endswith("CUDA_VISIBLE_DEVICES=GPU-11111111,GPU-33333333")


@pytest.mark.parametrize(
    "facts",
    [
        THREE._replace(warning="nvidia-smi -L: exit status 15"),
        GpuFacts((Gpu(None, "MIG-1", "a"), Gpu(None, "MIG-2", "a"))),
        GpuFacts((Gpu(0, "", "a"), Gpu(1, "", "a"))),
        GpuFacts(),
    ],
    ids=["in doubt", "MIG", "without UUIDs", "nothing known"],
)
def test_what_is_not_certain_is_not_missed(facts):
    assert preflight_report.judge(document(device(0)), facts, 20).well


def test_a_gpu_that_nvidia_smi_does_not_list_is_noted_and_stops_nobody():
    shown = document(device(0), device(1), device(2))
    judged = preflight_report.judge(shown, THREE._replace(gpus=THREE.gpus[:2]), 20)
    assert judged.well
    (note,) = [f for f in judged.findings if f.level == NOTE]
    assert (note.what, C in note.detail) == ("CUDA shows 3, nvidia-smi lists 2 of them", True)
    assert [f.level for f in preflight_report.judge(shown, THREE, 20).findings] == [OK]


GOOD_BAD_GOOD = [(A, True), (B, False), (C, True)]


@pytest.mark.parametrize(
    ("visible", "devices", "value"),
    [
        (None, GOOD_BAD_GOOD, "GPU-11111111,GPU-33333333"),
        ("2,0,1", GOOD_BAD_GOOD, "2,1"),
        (" 2, 0,1,-1", GOOD_BAD_GOOD, "2,1"),
        (f"{A},{B},GPU-3333", GOOD_BAD_GOOD, f"{A},GPU-3333"),
        (None, [("GPU-12345678-a", True), ("GPU-12345678-b", False)], "GPU-12345678-a"),
        (None, [("", True), ("", False)], "0"),
        ("MIG-1", [("MIG-1", False)], None),
        (None, [("MIG-1", False), (B, True)], None),
        ("0", [(A, False)], None),
        ("0", GOOD_BAD_GOOD, None),
        (None, [], None),
    ],
    ids=str,
)
def test_the_value_that_leaves_the_bad_gpus_out(visible, devices, value):
    assert visible_without(visible, devices) == value


def test_eight_bad_gpus_are_a_few_lines_that_do_not_move_the_cursor():
    failed = [device(n, good=False, step="context", code=9, error="\x1b[2J") for n in range(8)]
    lines = preflight_report.lines(preflight_report.judge(document(*failed), GpuFacts(), 20))
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    assert lines[4] == "and 4 more (saferun doctor)"
