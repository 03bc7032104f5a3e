"""The test of the GPUs before a job: against a driver that fails in every way.

The driver is a small library of C (fakes/libcuda.c) that is loaded as the real one would be;
everything else is real.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
import uuid as unique
from pathlib import Path

import pytest
from cases import slow, with_limits
from fakecuda import PROGRAM, ROOT, Machine, card, compiled, try_gpus, uuid

from saferun.gpu import (
    cuda_errors,
    preflight,
    preflight_gate,
    preflight_report,
    visible_devices,
)
from saferun.model import NOTE, OK, PROBLEM, Gpu, GpuFacts

A, B, C = (uuid(number) for number in range(3))
THREE = GpuFacts(tuple(Gpu(n, uuid(n), "NVIDIA Fake") for n in range(3)), "proc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Machine:
    return Machine(tmp_path, library)


def processes_with(mark: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def until(condition, limit_s=300):
    limit = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < limit, condition
        time.sleep(0.005)
    return value


# The program: what it tells of each GPU


def test_good_gpus_are_named_with_uuid_and_pci_address(library):
    reported = try_gpus(library)
    assert (reported["status"], reported["ended"]) == (0, "done")
    known = [(d["good"], d["uuid"], d["pci"]) for d in reported["devices"].values()]
    assert known == [(True, A, "0000:1a:00.0"), (True, B, "0000:1b:00.0")]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("context", 46),
        ("memory", 2),
        ("write", 719),
        ("copy", 999),
        ("read", 214),
        ("release", 700),
    ],
)
def test_a_call_that_fails_on_one_gpu_is_told_with_its_step(library, call, code):
    reported = try_gpus(library, FAKE_CUDA_BAD=f"1:{call}:{code}")
    good, bad = reported["devices"]["0"], reported["devices"]["1"]
    assert good["good"] is True
    assert (bad["good"], bad["step"], bad["code"]) == (False, call, code)
    assert reported["status"] == 69


def test_one_wrong_bit_in_what_is_read_back_is_seen(library):
    reported = try_gpus(library, FAKE_CUDA_BAD="0:read:garbage")["devices"]["0"]
    assert (reported["good"], reported["step"], reported["differs_at"]) == (False, "compare", 4711)


def test_a_driver_that_hangs_is_killed_in_time(library):
    mark = unique.uuid4().hex

    def tried(limit_s):
        return try_gpus(library, timeout_s=limit_s, FAKE_CUDA_INIT="hang", MARK=mark)

    reported = with_limits(tried, lambda reported: reported["step"] == "init")
    assert (reported["ended"], reported["step"], reported["status"]) == ("timeout", "init", 69)
    assert not processes_with(mark)


def test_one_gpu_that_hangs_does_not_hide_the_others(library):
    bad = {"FAKE_CUDA_GPUS": "3", "FAKE_CUDA_BAD": "1:context:hang"}
    reported = with_limits(
        lambda limit_s: try_gpus(library, timeout_s=limit_s, **bad),
        lambda reported: (
            [d.get("good") for d in reported["devices"].values()] == [True, None, True]
        ),
    )
    assert reported["devices"]["1"]["step"] == "context"


def test_a_driver_that_crashes_is_told_by_its_signal(library):
    reported = try_gpus(library, FAKE_CUDA_INIT="crash")
    assert (reported["ended"], reported["signal"], reported["step"]) == (
        "crash",
        signal.SIGABRT,
        "init",
    )


@pytest.mark.parametrize("count", ["-3", "100000", "0"])
def test_a_driver_that_lies_about_its_count_is_no_traceback(library, count):
    reported = try_gpus(library, FAKE_CUDA_GPUS=count)
    assert (reported["ended"], reported["output"], reported["status"]) == ("done", "", 69)
    assert not reported["devices"]


def test_a_library_that_is_none_is_said(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("not a library")
    reported = try_gpus(tmp_path)
    assert "libcuda.so.1" in reported["missing"]
    assert reported["status"] == 69


def test_the_test_ends_with_the_process_that_started_it(library, tmp_path):
    mark, log = unique.uuid4().hex, tmp_path / "log"
    argv = [sys.executable, "-I", "-S", str(PROGRAM), "--timeout", "60"]
    env = {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_INIT": "hang", "MARK": mark}
    env["FAKE_CUDA_LOG"] = str(log)
    parent = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    until(log.exists)  # in cuInit: it will not write to a pipe that nobody reads
    parent.kill()
    parent.wait()
    until(lambda: not processes_with(mark))


def test_the_program_needs_nothing_newer_than_python_3_9():
    for name in ("preflight", "preflight_report", "cuda_errors"):
        ast.parse(
            (ROOT / "src" / "saferun" / "gpu" / f"{name}.py").read_text(), feature_version=(3, 9)
        )


# What is made of it (pure)


def device(number, **reported):
    known = {"uuid": uuid(number), "pci": f"0000:{0x1A + number:02x}:00.0", "name": "Fake"}
    return {str(number): {**known, "good": True, "step": "release", **reported}}


def document(*devices, **reported):
    merged = {key: value for one in devices for key, value in one.items()}
    return {"ended": "done", "step": "end", "code": 0, "devices": merged, "output": "", **reported}


def problems(judged):
    return [finding for finding in judged.findings if finding.level == PROBLEM]


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


def test_the_number_in_the_job_is_told_where_it_is_another():
    failed = device(0, uuid=C, good=False, step="copy", code=719)
    judged = preflight_report.judge(document(failed, visible="2"), THREE, 20)
    assert problems(judged)[0].area == "GPU 2 (CUDA's 0)"


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
    assert visible_devices.visible_without(visible, devices) == value


def test_eight_bad_gpus_are_a_few_lines():
    failed = [device(n, good=False, step="context", code=46) for n in range(8)]
    lines = preflight_report.lines(preflight_report.judge(document(*failed), GpuFacts(), 20))
    assert len(lines) == 5
    assert lines[4] == "and 4 more (saferun doctor)"


def test_a_driver_s_text_cannot_move_the_cursor():
    failed = device(0, good=False, error="\x1b[2J", code=9999, uuid="GPU-\r\n1")
    (line,) = preflight_report.lines(preflight_report.judge(document(failed), GpuFacts(), 20))
    assert line.isprintable()


@pytest.mark.parametrize("code", cuda_errors.ERRORS)
def test_every_known_error_has_a_fix_and_a_source(code):
    known = cuda_errors.known(code)
    assert known.fix
    assert known.means
    assert known.source.startswith("https://")


# Questions to the machine that a failure leaves open


def examined(library, facts=THREE, timeout_s=300.0, path="/nowhere", **behaviour):
    environ = {"LD_LIBRARY_PATH": str(library), "PATH": path, "FAKE_CUDA_GPUS": "3", **behaviour}
    with preflight.PreflightTest(environ) as test:
        return preflight_gate.examine(test, environ, facts, timeout_s)


@pytest.mark.parametrize(
    "behaviour",
    [{"FAKE_CUDA_LOST": "1:101"}, {"FAKE_CUDA_BAD": "1:context:crash"}],
    ids=["cuInit fails with it", "it crashes the driver"],
)
def test_a_gpu_that_keeps_all_from_starting_is_found(library, behaviour):
    judged = examined(library, **behaviour)
    (finding,) = problems(judged)
    assert finding.area == "GPU 1"
    assert B in finding.what
    assert judged.findings[-1].what.endswith("CUDA_VISIBLE_DEVICES=GPU-11111111,GPU-33333333")


def test_what_fails_with_every_gpu_is_no_single_one_s_fault(library):
    (finding,) = examined(library, FAKE_CUDA_INIT="802").findings
    assert finding.area == "CUDA"
    assert all(gpu.uuid in finding.detail for gpu in THREE.gpus)


def test_the_holder_of_memory_is_asked_of_nvidia_smi(machine, library):
    machine.smi.reports(card(0), card(1, holders=[999999]), card(2))
    path = f"{machine.smi.folder}:/usr/bin:/bin"
    judged = examined(library, path=path, FAKE_CUDA_BAD="1:memory:2")
    assert "held by pid 999999 (ended, 70000 MiB)" in problems(judged)[0].fix


@pytest.mark.parametrize("script", ["yes", *slow("sleep 600", "echo rubbish; exit 9")])
def test_an_nvidia_smi_that_hangs_or_lies_costs_a_bounded_time(machine, library, script):
    machine.smi.behaves(script)
    path = f"{machine.smi.folder}:/usr/bin:/bin"
    with_limits(
        lambda limit_s: examined(library, path=path, timeout_s=limit_s, FAKE_CUDA_BAD="1:memory:2"),
        lambda judged: problems(judged)[0].fix.startswith("end what holds it"),
        first_s=8,
    )


# Whole launches


@pytest.fixture
def job(machine: Machine) -> str:
    (machine.folder / "job.py").write_text("print('the job runs', flush=True)\n")
    return "job.py"


def argv(mode, *more):
    return ["--profile", "h100", "--set", f"preflight.mode={mode}", *more]


PYTHON = ["--set", "launcher=python"]
WAYS = {"supervised": PYTHON, "replaced": [*PYTHON, "--retries", "0"]}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@each_way
def test_require_starts_nothing_on_a_bad_gpu(machine, job, way):
    ran = machine.run(*argv("require", *way), job, FAKE_CUDA_BAD="1:copy:719")
    assert (ran.status, ran.out) == (69, "")
    assert any(B in line and "CUDA_ERROR_LAUNCH_FAILED (719)" in line for line in ran.messages)
    assert "to run without the bad one: export CUDA_VISIBLE_DEVICES=GPU-11111111" in ran.messages
    assert ran.messages[-1] == "nothing is started (preflight.mode: require)"


@each_way
def test_warn_says_it_and_goes_on(machine, job, way):
    ran = machine.run(*argv("warn", *way), job, FAKE_CUDA_BAD="1:copy:719")
    assert (ran.status, ran.out) == (0, "the job runs\n")
    assert sum(B in line for line in ran.messages) == 1
    assert ran.messages[-1] == "starting all the same (preflight.mode: warn)"


@each_way
def test_good_gpus_are_not_spoken_of(machine, job, way):
    ran = machine.run(*argv("require", *way), job)
    assert (ran.status, ran.out, len(ran.messages)) == (0, "the job runs\n", 1)


@each_way
def test_no_gpu_is_touched_unless_the_profile_says_so(machine, job, way):
    log = machine.folder / "log"
    assert machine.run("--profile", "h100", *way, job, FAKE_CUDA_LOG=str(log)).status == 0
    assert not log.exists()
    assert machine.run(*argv("warn", *way), job, FAKE_CUDA_LOG=str(log)).status == 0
    assert log.read_text() == "-\n"


def test_only_what_the_job_will_see_is_tried(machine, job):
    bad = {"FAKE_CUDA_BAD": "0:copy:719"}
    ran = machine.run(*argv("require", *PYTHON), job, CUDA_VISIBLE_DEVICES="1", **bad)
    assert ran.status == 0
    ran = machine.run(*argv("require", *PYTHON), job, CUDA_VISIBLE_DEVICES="1,0", **bad)
    assert ran.status == 69
    assert "to run without the bad one: export CUDA_VISIBLE_DEVICES=1" in ran.messages


def test_the_advice_is_good(machine, job):
    """The value that is said, exported, makes the job run."""
    bad = {"FAKE_CUDA_BAD": "0:copy:719"}
    first = machine.run(*argv("require", *PYTHON), job, **bad)
    (advice,) = [line for line in first.messages if "CUDA_VISIBLE_DEVICES=" in line]
    value = advice.rpartition("=")[2]
    again = machine.run(*argv("require", *PYTHON), job, CUDA_VISIBLE_DEVICES=value, **bad)
    assert again.status == 0


def test_a_machine_without_a_driver_is_refused_by_require(machine, job):
    (machine.folder / "none").mkdir()
    (machine.folder / "none" / "libcuda.so.1").write_text("")
    none = {"LD_LIBRARY_PATH": str(machine.folder / "none")}
    ran = machine.run(*argv("require", *PYTHON), job, **none)
    assert ran.status == 69
    assert any("there is no NVIDIA driver library" in line for line in ran.messages)
    assert machine.run("--profile", "cpu", *PYTHON, job, **none).status == 0


def test_a_hang_is_bounded_by_the_profile_and_named(machine, job):
    def ran(limit_s):
        limit = argv("require", *PYTHON, "--set", f"preflight.timeout_s={limit_s}")
        return machine.run(*limit, job, FAKE_CUDA_INIT="hang")

    answer = "the driver does not answer: init took "
    with_limits(
        ran,
        lambda ran: ran.status == 69 and any(answer in line for line in ran.messages),
        first_s=5,
    )


def test_ctrl_c_ends_a_test_that_hangs(machine, job):
    mark = unique.uuid4().hex
    process = machine.start(*argv("require", *PYTHON), job, FAKE_CUDA_INIT="hang", MARK=mark)
    until(lambda: any("--touch" in line(pid) for pid in processes_with(mark)))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)
    assert process.returncode == -signal.SIGINT
    until(lambda: not processes_with(mark))


def line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_the_journal_keeps_what_was_found(machine, job):
    ran = machine.run(*argv("warn", *PYTHON), job, FAKE_CUDA_BAD="1:copy:719")
    (event,) = ran.events("preflight")
    assert event["granted"] is True
    assert [f["level"] for f in event["findings"]] == [PROBLEM, NOTE]


def test_torchrun_starts_meanwhile_and_the_job_only_afterwards(machine):
    """The test takes a second, most of which torchrun needs for itself anyway."""
    (machine.folder / "job.py").write_text(
        "import os, glob\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: text = open(path).read()\n"
        "    except OSError: continue\n"
        "    assert '--touch' not in text or os.environ['MARK'] not in text\n"
        "print('the job runs', os.environ['SAFERUN_ATTEMPT'])\n"
    )
    ran = machine.run(*argv("require", "--nproc-per-node", "1"), "job.py", FAKE_CUDA_INIT_MS="500")
    assert (ran.status, ran.out) == (0, "the job runs 1\n"), ran.err
    assert len(ran.messages) == 1
    assert ran.events("preflight")[0]["granted"] is True
