"""Recovery between the attempts of a run, and on its own."""

import fcntl
import os
from pathlib import Path

import pytest
from fake_nvml import gpu
from fakecuda import MINOR
from gpu_runs import Machine
from recovery_host import GPU, A, holder, left_by
from rights import needs

from saferun.diagnosis import signatures
from saferun.gpu import orphans
from saferun.gpu.cuda_errors import AFTER
from saferun.gpu.lock import lock_dir
from saferun.gpu.preflight import preflight_gate
from saferun.model import OK, GpuFacts

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.00 GiB is free. Process 4711 has 76.00 GiB memory in use. Of the allocated memory "
    "1.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


def test_the_kinds_that_ask_for_recovery_are_kinds():
    assert set(AFTER) <= set(signatures.load().kinds)


@needs("make devices")
def test_a_leftover_that_fills_the_gpu_is_ended_before_the_next_attempt(machine, tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys\n"
        "class OutOfMemoryError(RuntimeError): __module__ = 'torch'\n"
        f"if os.environ['SAFERUN_ATTEMPT'] == '1': raise OutOfMemoryError({FULL!r})\n"
        "print('done')\n",
        encoding="utf-8",
    )
    (tmp_path / "dev").mkdir()
    # Other tests look at the GPUs 0 and 1 at the same time, and other suites at one of this test's.
    number = os.makedev(orphans.NVIDIA_MAJOR, 10 + os.getpid() % 200)
    os.mknod(tmp_path / "dev" / f"nvidia{MINOR}", 0o20600, number)
    # A run of another HOME does not find its journal: recoveries of other tests look at all GPUs.
    with holder(tmp_path / "dev", **left_by(machine.runs)) as process:
        machine.nvml.reports(gpu(0, holders=[process.pid], used=77000), look=0)
        machine.nvml.reports(gpu(0), gpu(1))
        options = ["--set", "launcher=python", "--set", "retry.backoff_s=[0, 0]"]
        ran = machine.run("--profile", "h100", *options, "job.py")
        assert process.wait(300) == -9
    assert (ran.status, ran.out) == (0, "done\n"), ran.err
    assert any("ended what an earlier run had left on the GPUs" in line for line in ran.messages)
    assert [f["level"] for event in ran.events("recovery") for f in event["findings"]] == [OK]


@pytest.mark.parametrize(
    ("failure", "trials"),
    [("raise OutOfMemoryError(text)", 2), ("os.kill(os.getpid(), 9)", 1)],
    ids=["a full GPU", "killed"],
)
def test_gpus_are_tried_again_after_a_failure_that_may_be_theirs(
    machine, tmp_path, failure, trials
):
    (tmp_path / "job.py").write_text(
        "import os\n"
        "class OutOfMemoryError(RuntimeError): __module__ = 'torch'\n"
        f"text = {FULL!r}\n"
        f"if os.environ['SAFERUN_ATTEMPT'] == '1': {failure}\n",
        encoding="utf-8",
    )
    options = ["--set", "launcher=python", "--set", "retry.backoff_s=[0, 0]"]
    options += ["--set", "preflight.mode=require"]
    ran = machine.run("--profile", "h100", *options, "job.py")
    assert ran.status == 0, ran.err
    assert [event["granted"] for event in ran.events("preflight")] == [True] * trials


@pytest.fixture
def machine(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One whose locks are its own, since the UUIDs are the same in all tests."""
    monkeypatch.setattr(lock_dir, "_directories", lambda environ: [str(tmp_path / "locks")])
    return Machine(tmp_path, library)


def on_its_own(machine, **behaviour):
    facts = GpuFacts((GPU,), "proc")
    environ = {**machine.environ, "FAKE_CUDA_GPUS": "1", **behaviour}
    return preflight_gate.recover_cuda_context(environ, facts, reset="when-idle", runs="")


def test_recovery_on_its_own_says_that_there_is_nothing_to_do(machine):
    machine.nvml.reports(gpu())
    assert {finding.level for finding in on_its_own(machine)} == {OK}


def test_recovery_on_its_own_names_the_gpu_that_stays_bad(machine):
    machine.nvml.reports(gpu(GetMigMode="1 1"))
    found = on_its_own(machine, FAKE_CUDA_BAD="0:copy:719")
    assert any("which is not saferun's to do here" in finding.what for finding in found)
    assert any("CUDA_ERROR_LAUNCH_FAILED (719)" in finding.what for finding in found)
    assert not any("--gpu-reset" in argv for argv in machine.smi.asked)


def test_recovery_leaves_gpus_alone_that_another_run_has(machine, tmp_path):
    on_its_own(machine)  # makes the directory
    before = machine.smi.asked
    with (tmp_path / "locks" / f"{A}.lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = on_its_own(machine)
    assert [finding.area for finding in found] == ["locks"]
    assert machine.smi.asked == before
