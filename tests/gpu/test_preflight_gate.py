"""The test of the GPUs before a job: what it asks of the machine, and whole launches."""

import json
import signal

import pytest
from cases import few, slow, with_limits
from fake_nvml import gpu
from fakecuda import THREE, B, problems
from gpu_runs import Machine
from helpers import NO_PID, until

from saferun.gpu.preflight import preflight, preflight_gate
from saferun.model import NOTE, PROBLEM


def examined(library, facts=THREE, timeout_s=300.0, **behaviour):
    environ = {
        "LD_LIBRARY_PATH": str(library),
        "PATH": "/nowhere",
        "FAKE_CUDA_GPUS": "3",
        **behaviour,
    }
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


def test_the_holder_of_memory_is_asked_of_nvml(machine, library):
    machine.nvml.reports(gpu(0), gpu(1, holders=[NO_PID]), gpu(2))
    judged = examined(machine.environ["LD_LIBRARY_PATH"], FAKE_CUDA_BAD="1:memory:2")
    assert f"held by pid {NO_PID} (ended, 70000 MiB)" in problems(judged)[0].fix


@pytest.mark.parametrize("behaviour", ["hang", *slow("crash", "!9")])
def test_an_nvml_that_hangs_or_fails_costs_a_bounded_time(machine, behaviour):
    machine.nvml.reports(gpu(0), gpu(1), Init_v2=behaviour)
    library = machine.environ["LD_LIBRARY_PATH"]
    with_limits(
        lambda limit_s: examined(library, timeout_s=limit_s, FAKE_CUDA_BAD="1:memory:2"),
        lambda judged: problems(judged)[0].fix.startswith("end what holds it"),
        first_s=2,
    )


# Whole launches


@pytest.fixture
def job(machine: Machine) -> str:
    (machine.folder / "job.py").write_text("print('the job runs', flush=True)\n", encoding="utf-8")
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
    value = next(line for line in ran.messages if "export CUDA_" in line).rpartition("=")[2]
    advised = {"CUDA_VISIBLE_DEVICES": value, "FAKE_CUDA_BAD": "1:copy:719"}
    again = machine.run(*argv("require", *way), job, **advised)  # and that is not spoken of
    assert (again.status, again.out, len(again.messages)) == (0, "the job runs\n", 1)


@each_way
def test_warn_says_it_and_goes_on(machine, job, way):
    ran = machine.run(*argv("warn", *way), job, FAKE_CUDA_BAD="1:copy:719")
    assert (ran.status, ran.out) == (0, "the job runs\n")
    assert sum(B in line for line in ran.messages) == 1
    assert ran.messages[-1] == "starting all the same (preflight.mode: warn)"
    if "--retries" not in way:
        (event,) = ran.events("preflight")
        assert event["granted"] is True
        assert [f["level"] for f in event["findings"]] == [PROBLEM, NOTE]


@each_way
def test_no_gpu_is_touched_unless_the_profile_says_so(machine, job, way):
    log = machine.folder / "log"
    assert machine.run("--profile", "h100", *way, job, FAKE_CUDA_LOG=str(log)).status == 0
    assert not log.exists()
    assert machine.run(*argv("warn", *way), job, FAKE_CUDA_LOG=str(log)).status == 0
    assert log.read_text(encoding="utf-8") == "-\n"


def test_a_machine_without_a_driver_is_refused_by_require(machine, job):
    (machine.folder / "none").mkdir()
    (machine.folder / "none" / "libcuda.so.1").write_text("", encoding="utf-8")
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
        first_s=1,
    )


def test_ctrl_c_ends_a_test_that_hangs(machine, job):
    with machine.start(*argv("require", *PYTHON), job, FAKE_CUDA_INIT="hang") as ran:
        until(lambda: ran.processes("preflight.py"), "a test")
        ran.process.send_signal(signal.SIGINT)
        assert ran.end() == -signal.SIGINT
        ran.nothing_lives()


def test_torchrun_starts_meanwhile_and_the_job_only_afterwards(machine):
    """The test takes a second, most of which torchrun needs for itself anyway."""
    job = "import os, time\nprint(os.environ['SAFERUN_ATTEMPT'], time.time())\n"
    (machine.folder / "job.py").write_text(job, encoding="utf-8")
    ran = machine.run(*argv("require", "--nproc-per-node", "1"), "job.py", FAKE_CUDA_INIT_MS="500")
    assert ran.status == 0, ran.err
    attempt, began_at = ran.out.split()
    (event,) = ran.events("preflight")
    assert (attempt, event["granted"]) == ("1", True)
    assert event["at"] <= float(began_at)
    assert len(ran.messages) == 1


# The history of parts

ECC = "import sys; sys.exit('RuntimeError: CUDA error: uncorrectable ECC error encountered')"


def failed_twice(machine):
    for _ in range(2):
        job = machine.run("--profile", "h100", *PYTHON, "-c", ECC, CUDA_VISIBLE_DEVICES="1")
        assert (job.status, "failed in 2" in job.err) == (1, False)


@pytest.mark.parametrize("way", few(WAYS, "supervised"))
def test_a_gpu_that_fails_again_and_again_is_named_and_may_be_refused(machine, job, way):
    failed_twice(machine)
    ran = machine.run("--profile", "h100", *way, job)
    (line,) = (line for line in ran.messages if "failed in 2 of its last 2 runs" in line)
    assert f"GPU 1 ({B})" in line
    assert line.count("gpu-ecc-uncorrectable on 2") == 2
    assert f"`saferun runs parts clear {B}`" in line
    assert (ran.status, ran.out) == (0, "the job runs\n")
    refuse = ["--set", "preflight.history=refuse"]
    assert machine.run(*argv("warn", *way, *refuse), job).status == 0
    ran = machine.run(*argv("require", *way, *refuse), job)
    assert (ran.status, ran.out) == (69, "")
    assert ran.messages[-1] == "nothing is started (preflight.history: refuse)"
    off = machine.run(*argv("require", *way, "--set", "preflight.history=off"), job)
    assert (off.status, len(off.messages)) == (0, 1)
    with_other = machine.run(*argv("require", *way, *refuse), job, CUDA_VISIBLE_DEVICES="0")
    assert with_other.status == 0


def test_parts_are_listed_and_forgotten(machine, job):
    failed_twice(machine)
    shown = machine.run("runs", "parts", "list")
    assert shown.status == 0
    assert f"{B} of " in shown.out
    assert "2 of its last 2 runs; named before a job begins" in shown.out
    shown = machine.run("runs", "parts", "list", "--json")
    first = json.loads(shown.out)["parts"][0]
    assert (first["gpu"], first["named"], len(first["failures"])) == (B, True, 2)
    (machine.folder / "torch.py").write_text("raise ImportError", encoding="utf-8")
    seen = machine.run("doctor", PYTHONPATH=str(machine.folder))
    assert "failed in 2 of its last 2 runs" in " ".join(seen.out.split())
    cleared = machine.run("runs", "parts", "clear", B)
    assert cleared.out == "2 runs with such failures forgotten\n"
    assert len(machine.run("--profile", "h100", *PYTHON, job).messages) == 1
