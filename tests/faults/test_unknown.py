"""Failures of which the output says nothing: what the machine shows decides, and is named."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_groups import small_group
from disks import small_disk
from fake_nvml import Nvml, gpu
from runs import Run, ran, small_torchrun
from sandbox import nvidia_smi, shell

PYTHON = ["--profile=cpu", "--set=launcher=python", "--set=retry.backoff_s=[0, 0]", "-c"]
UUID = "GPU-6a6ba0d6-0000-1111-2222-333344445555"
SILENT = "import sys; print('odd'); sys.exit(1)"


def decided(job: Run) -> tuple[str, str, list[str]]:
    """The kind of the first attempt's failure, its line, and the evidence that decided."""
    event = job.events("ended")[0]
    return event["kind"], event["root_line"], event["decided_by"]


def test_a_signal_that_nothing_else_reports_is_known_from_the_exit_status(tmp_path):
    code = "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()"
    job = ran(tmp_path, *PYTHON, code, status=142)
    assert decided(job) == ("ended-by-signal", "ended by SIGALRM", ["exit status 142"])
    assert "saferun: known from: exit status 142" in job.messages()
    shown = job.ask("runs", "show", "last")
    assert re.search(r"^  from +exit status 142$", shown, re.MULTILINE)


def test_what_the_job_itself_said_is_named_in_the_journal_alone(tmp_path):
    job = ran(tmp_path, *PYTHON, "1 / 0", status=1)
    kind, _, evidence = decided(job)
    assert (kind, evidence) == ("user-exception", ["log"])
    assert not [line for line in job.messages() if "known from" in line]


def test_an_unknown_end_is_half_answered_in_the_last_words(tmp_path):
    code = "import sys; print('INFO NCCL Failed to open libibverbs.so'); sys.exit(1)"
    job = ran(tmp_path, *PYTHON, code, status=1)
    assert decided(job)[0] == "unknown"
    assert any("nearest is nccl-ib-error; against it: " in line for line in job.messages())


def test_a_full_disk_is_seen_where_the_job_does_not_say_why_it_ends(tmp_path):
    code = "import os\ntry: open(os.environ['TMPDIR'] + '/x', 'wb', 0).write(b'0' * 4194304)\n"
    code += f"except OSError: pass\n{SILENT}"
    with small_disk(tmp_path / "small", "2m") as place:
        job = ran(tmp_path, *PYTHON, code, env={"TMPDIR": str(place)}, status=1)
    text = f"the disk of {place} is full: 0 KiB free"
    assert decided(job) == ("disk-full", text, ["disk"])


@pytest.fixture
def small_memory() -> Iterator[Path]:
    with small_group(300_000_000) as group:
        yield group


def test_a_process_that_the_kernel_killed_is_seen_where_nothing_is_said(tmp_path, small_memory):
    """The job starts a program that takes more than there is, and does not look how it ended."""
    eats = "import subprocess, sys; subprocess.call([sys.executable, '-c', 'bytearray(9**9)'])"
    inside = f'echo $$ > {shell(small_memory)}/cgroup.procs; exec "$@"'
    command = ["sh", "-c", inside, "sh", sys.executable, "-m", "saferun"]
    job = ran(tmp_path, *PYTHON, f"{eats}; {SILENT}", command=command, status=1)
    text = "kernel: 1 killed for lack of memory while it ran"
    assert decided(job) == ("host-oom-killed", text, ["kernel's count of kills"])


def test_what_the_kernel_killed_in_another_group_did_not_kill_the_job(tmp_path, small_memory):
    eats = f"open('{small_memory}/cgroup.procs', 'w').write('0'); bytearray(9**9)"
    code = f"import os, subprocess, sys; subprocess.call([sys.executable, '-c', {eats!r}])"
    job = ran(tmp_path, *PYTHON, f"{code}; os.kill(os.getpid(), 9)", status=137)
    assert decided(job)[0] == "killed-from-outside"


@pytest.mark.parametrize(
    ("action", "expected"),
    [("None", "unknown"), ("Reset", "gpu-lost"), ("Drain P2P", "gpu-link-failed")],
)
def test_a_gpu_that_its_driver_wants_reset_is_seen(tmp_path, action, expected):
    nvml = Nvml(tmp_path / "nvml")
    number = {"None": 0, "Reset": 1, "Drain P2P": 3}[action]
    nvml.reports(gpu(GetUUID=UUID, **{"value.230": str(number)}))
    environ = small_torchrun(tmp_path) | {"LD_LIBRARY_PATH": str(nvml.folder)}
    nvidia_smi(tmp_path / "bin", f"echo 'GPU 0: NVIDIA H100 (UUID: {UUID})'")
    (tmp_path / "train.py").write_text(SILENT, encoding="utf-8")
    job = ran(tmp_path, "--set=locks.gpus=off", "train.py", env=environ, status=1)
    kind, line, evidence = decided(job)
    assert kind == expected, job.err
    if expected != "unknown":
        assert (line, evidence) == (f"GPU 0: GPU Recovery Action: {action}", ["NVML"])
