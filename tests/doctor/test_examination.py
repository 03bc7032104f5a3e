"""`saferun doctor` as a whole: real processes on machines whose driver libraries are fakes.

Whatever these do (hang, lie, die), there are findings, no traceback, and an end within 20 s.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from cases import with_limits
from fake_nvml import Nvml, asking, bus, gpu, listing
from fakecuda import uuid
from helpers import free_port, is_alive, until
from sandbox import SAFERUN, Sandbox, no_driver, shell

from saferun.doctor import examination
from saferun.doctor.checks import checks_host
from saferun.doctor.collect import all_sources, nvidia
from saferun.model import NOTE, OK, PROBLEM, Finding
from saferun.system import gpus, kernellog

_shm = os.statvfs("/dev/shm")
roomy = pytest.mark.skipif(
    _shm.f_blocks * _shm.f_frsize < checks_host.SHM_SMALL,
    reason="the doctor finds this machine's /dev/shm small (docker run --shm-size=1g)",
)


class FakeHost(Sandbox):
    """A user's shell on a machine with a fake NVML, libcuda, nvidia-smi and torchrun."""

    def __init__(self, folder: pathlib.Path, library: pathlib.Path) -> None:
        no_driver()
        self.nvml = Nvml(folder / "nvml")
        self.nvml.reports(Init_v2="!9")
        port, libraries = str(free_port()), f"{self.nvml.folder}:{library}"
        own = {"LD_LIBRARY_PATH": libraries, "MASTER_PORT": port}
        super().__init__(folder, cwd=folder / "work", path=(), **own)
        self.program("torchrun", "#!/bin/sh\nexit 1\n")  # a shim: other tests ask torch

    def has(self, *gpus: dict[str, str], **general: str) -> None:
        """Give it these GPUs."""
        self.nvml.reports(*gpus, **general)
        listing(self.bin, len(gpus))

    def examine(self, deadline_s: float = 19.0, **environ: str) -> tuple[Finding, ...]:
        environ = {**self.environ, **environ}
        found = examination.examine(environ, str(self.cwd), deadline_s=deadline_s)
        assert not any("fault of saferun" in f.what for f in found.findings), found.findings
        return found.findings

    def command(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        encoding = environ.get("PYTHONIOENCODING", "utf-8").partition(":")[0]
        return self.ran(*SAFERUN, "doctor", *arguments, env=environ, encoding=encoding)


@pytest.fixture
def host(tmp_path: pathlib.Path, libcuda: pathlib.Path) -> FakeHost:
    return FakeHost(tmp_path, libcuda)


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """A function that does not return before the test is over."""
    over = threading.Event()
    yield lambda *_, **__: over.wait() and None
    over.set()


def about(findings: Sequence[Finding], area: str) -> list[Finding]:
    return [f for f in findings if f.area == area]


def problems(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.level == PROBLEM]


# A machine that is well


@roomy
def test_a_machine_of_two_gpus_that_is_well_has_no_problem(host):
    host.has(gpu(0), gpu(1))
    found = host.examine()
    assert problems(found) == []
    assert examination.status((*found, Finding(NOTE, "a", "b", "", ""))) == 0
    assert [f.level for f in about(found, "GPU 0") + about(found, "GPU 1")] == [OK, OK]
    assert "2 transfers" in about(found, "peer to peer")[0].what
    assert "2 links up" in about(found, "NVLink")[0].what
    assert about(found, "CUDA") or about(found, "GPUs")


@roomy
def test_the_command_prints_a_report_and_exits_with_1_where_there_is_a_problem(host):
    host.has(gpu(0), gpu(1))
    done = host.command(FAKE_CUDA_PEERS="0:1:copy:wrong")
    assert (done.returncode, done.stderr) == (1, "")
    problems = done.stdout.partition("\nproblems\n")[2].partition("\nnotes\n")[0]
    subjects = set(re.findall(r"^  (\S.*?) {2,}", problems, re.MULTILINE))
    # A torch for CPUs beside saferun is a problem of these two GPUs, too.
    assert subjects - {"torch"} == {"GPU 0 to 1"}, done.stdout
    assert "\033" not in done.stdout
    wide = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert all(len(line.split()) == 1 for line in wide), wide  # a path or an address


@roomy
@pytest.mark.parametrize(
    ("where", "status", "message"),
    [
        (">&-", 0, ""),
        ("--json >&-", 0, ""),
        ("> /dev/full", 69, "saferun: the output cannot be written: No space left on device"),
    ],
    ids=["closed", "json-closed", "full"],
)
def test_a_report_that_cannot_be_written_causes_no_traceback(host, where, status, message):
    script = f"{shell(*SAFERUN, 'doctor')} {where}"
    command = ["bash", "-c", script]
    done = subprocess.run(command, env=host.environ, cwd=host.cwd, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (status, message)


def test_driver_output_that_the_terminal_cannot_show_causes_no_traceback(host):
    host.has(gpu(0, GetName="NVIDIA 显卡"))
    done = host.command(PYTHONIOENCODING="latin-1")
    assert "NVIDIA \\u663e\\u5361" in done.stdout
    assert done.stderr == ""


# A machine that is not


@pytest.mark.parametrize(
    ("of", "behaviour"),
    [("library", "hang"), ("library", "crash"), ("listing", "trap '' TERM; sleep 600 & wait")],
    ids=["NVML", "NVML dies", "nvidia-smi"],
)
def test_a_driver_that_hangs_or_dies_is_cut_off(host, of, behaviour):
    host.has(gpu(0), gpu(1), **({"Init_v2": behaviour} if of == "library" else {}))
    if of == "listing":
        listing(host.bin, 2, behaviour)
    found = host.examine(deadline_s=2.0)
    clause = "SIGABRT" if behaviour == "crash" else "did not end"
    assert any(clause in f"{f.what} {f.detail}" for f in found), found


def test_a_gpu_that_is_lost_during_the_trial_is_named(host):
    host.has(gpu(0), gpu(1))
    found = host.examine(FAKE_CUDA_BAD="1:context:46")
    assert any(f.level == PROBLEM and "GPU 1" in f.area for f in found), found


def test_a_driver_library_that_does_not_start_is_a_problem(host):
    host.has(gpu(0), gpu(1))
    found = host.examine(FAKE_CUDA_INIT="802")
    assert any("802" in f"{f.what} {f.detail}" for f in problems(found)), problems(found)


@pytest.mark.parametrize("when", ["the list of GPUs", "the first context"])
def test_what_is_known_at_the_deadline_is_judged(host, hang, monkeypatch, when):
    host.has(gpu(0, **{"value.230": "1"}))
    if when == "the list of GPUs":
        monkeypatch.setattr(gpus, "detect", hang)
    found = with_limits(
        lambda s: host.examine(deadline_s=s, FAKE_CUDA_INIT="hang", FAKE_CUDA_GPUS="1"),
        lambda found: any("asks for: Reset" in f.what for f in about(found, "GPU 0")),
        first_s=1,
    )
    late = [f for f in about(found, "doctor") if "the GPUs: no answer" in f.what]
    assert late or when == "the first context"


def test_a_gpu_whose_memory_is_full_is_not_touched(host, tmp_path):
    host.has(gpu(0), gpu(1, used=143000))
    log = tmp_path / "log"
    found = host.examine(FAKE_CUDA_LOG=str(log))
    assert log.read_text(encoding="utf-8") == f"{uuid(0)}\n"
    assert [f.level for f in about(found, "GPU 1")] == [PROBLEM, NOTE]


def test_a_driver_whose_files_hang_is_named_and_not_called_absent(host, hang, monkeypatch):
    monkeypatch.setattr(all_sources, "FILES_S", 0.1)
    monkeypatch.setattr(nvidia, "driver_files", hang)
    host.has(gpu(0))
    found = host.examine(FAKE_CUDA_GPUS="1")
    assert ["the driver's files" in f.what for f in about(found, "doctor")] == [True]
    assert about(found, "driver") == []
    assert about(found, "disk")


def test_xid_events_are_judged_although_the_drivers_files_are_not_shown(host, monkeypatch):
    """As in a container without /proc/driver/nvidia."""
    line = f"NVRM: Xid (PCI:{bus(0)[:-2]}): 79, pid=71, GPU has fallen off the bus."
    monkeypatch.setattr(kernellog, "read", lambda environ: kernellog.Log((line,), "x"))
    host.has(gpu(0, **{"value.230": "2"}))
    found = about(host.examine(FAKE_CUDA_GPUS="1"), "GPU 0")
    assert any(f.level == PROBLEM and "Xid 79" in f.what for f in found), found


def test_a_question_that_was_not_answered_in_time_leaves_no_process(host):
    host.has(gpu(0), Init_v2="hang")
    with_limits(lambda s: host.examine(deadline_s=s), lambda _: host.nvml.asked, first_s=1)
    until(lambda: not asking(os.getpid()), "the child is gone")


@pytest.mark.parametrize("asked", ["NVML", "nvidia-smi"])
def test_ctrl_c_leaves_nothing_behind(host, tmp_path, asked):
    new, pid = tmp_path / "new", tmp_path / "pid"
    host.has(gpu(0), **({"Init_v2": "hang"} if asked == "NVML" else {}))
    if asked == "nvidia-smi":
        listing(host.bin, 1, f"echo $$ > {shell(new)}; {shell('mv', new, pid)}; exec sleep 60")
    command = [sys.executable, "-m", "saferun", "doctor"]
    with subprocess.Popen(command, env=host.environ, stderr=subprocess.PIPE, text=True) as started:
        hangs = {"NVML": lambda: host.nvml.asked, "nvidia-smi": pid.exists}
        until(hangs[asked], f"{asked} is asked")
        pids = asking(started.pid) if asked == "NVML" else [int(pid.read_text(encoding="utf-8"))]
        started.send_signal(signal.SIGINT)
        _, error = started.communicate(timeout=200)
    assert (started.returncode, "Traceback" in error) == (130, False)
    assert pids
    until(lambda: not any(map(is_alive, pids)), f"{asked} is gone")


@roomy
def test_a_machine_without_anything_is_a_note(host):
    environ = {**host.environ, "LD_LIBRARY_PATH": ""}
    known = examination.examine(environ, str(host.cwd), recover=True)
    found = examination.measure(known, environ).findings
    assert problems(found) == []
    for area in ("driver", "recovery", "speed"):
        assert [f.level for f in about(found, area)] == [NOTE]


def test_recovery_comes_first_and_the_trial_is_reported_once(host):
    host.has(gpu(0), gpu(1))
    found = examination.examine(host.environ, str(host.cwd), recover=True).findings
    assert len(found) == len(set(found))
    assert sum("made a context" in f.what for f in found) == 1


# Its parts

PORTS = (
    ({}, 29500),
    ({"MASTER_PORT": "1234"}, 1234),
    ({"MASTER_PORT": "1234", "PET_MASTER_PORT": "4321"}, 4321),
    *(({"MASTER_PORT": wrong}, 29500) for wrong in ("²²", "0", "65536", "9" * 5000)),
)


def test_the_port_that_is_checked_is_the_one_that_the_job_would_use():
    found = [(environ, all_sources.rendezvous_port(environ)) for environ, _ in PORTS]
    assert found == list(PORTS)


def test_variables_that_are_not_text_cause_no_traceback(host):
    odd = {"HF_HOME": "/tmp/\udcff", "NCCL_SOCKET_IFNAME": "\udcff²", "SLURM_NNODES": "²"}
    strict = {"PYTHONIOENCODING": "utf-8:strict", "CUDA_VISIBLE_DEVICES": "\udcff\033[31m"}
    done = host.command(LD_LIBRARY_PATH="", **strict, **odd)
    assert (done.returncode, done.stderr) == (1, "")
    assert "a fault of saferun" not in done.stdout
    assert "\033" not in done.stdout


def test_a_source_that_did_not_answer_is_reported_and_not_judged(host, hang, monkeypatch):
    def fail(environ: object) -> kernellog.Log:
        raise OSError("x")

    monkeypatch.setattr(kernellog, "read", fail)
    monkeypatch.setattr(all_sources.network, "examine", hang)
    found = examination.examine(host.environ, str(host.cwd), deadline_s=1.0).findings
    late, failed = about(found, "doctor")
    assert (late.level, "the network" in late.what) == (PROBLEM, True)
    assert (failed.level, "OSError: x" in failed.detail) == (NOTE, True)
    assert about(found, "network") == []


def test_json_holds_findings_and_facts_without_secrets(host):
    secret = "hunter2-0123456789abcdef"
    host.has(gpu(0, GetName=f"failed for {secret}"))
    done = host.command("--json", WANDB_API_KEY=secret)
    assert secret not in done.stdout
    assert done.stdout.count("failed for ") >= 2
    document = json.loads(done.stdout)
    assert (document["schema"], list(document)) == (1, ["schema", "findings", "facts"])
    assert {tuple(f) for f in document["findings"]} == {("level", "area", "what", "detail", "fix")}
    assert document["facts"]["gpus"]["smi"]["report"]["cards"][0]["fields"]["GPU UUID"] == uuid(0)
    assert document["facts"]["network"]["hostname"]
