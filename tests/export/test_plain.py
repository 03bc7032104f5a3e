"""The script of `gen-shell --plain` in a real bash: what its job gets, when it is tried again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import slow
from helpers import until
from repo import ROOT
from sandbox import shell, shell_program
from scripts import NASTY, STAYS, TORCHRUN, Machine, end, signals, up
from terminals import start

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
TOOLS = Path(sys.executable).parent
# Conditions are asked of a Python with torch; the job is the recording program.
ASKED = f'case "$2" in "import torch;"*) exec {shell(sys.executable)} "$@" ;; esac'
RANK = """\
import os, signal, sys
with open("started", "a") as file:
    file.write(" ".join([os.environ["RANK"], *sys.argv[1:]]) + chr(10))
if os.environ["RANK"] == "1" and "--resume" not in sys.argv:
    {failure}
"""


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.program("recording", TORCHRUN)
    machine.program("python3", shell_program(machine.bin / "recording", before=ASKED))
    return machine


def script(machine: Machine, *argv: str, profile: str = "cpu", **environ: str) -> Path:
    environ = {"SAFERUN_SET": "retry.backoff_s='[0, 0]'", **environ}
    return machine.script("--plain", "--profile", profile, *argv, **environ)


def test_it_has_at_most_60_lines_and_shellcheck_is_silent(machine):
    files = []
    for name in PROFILES:
        files.append(machine.tmp / f"{name}.sh")
        files[-1].write_text(
            script(machine, "--", "t.py", NASTY, profile=name).read_text(encoding="utf-8"),
            encoding="utf-8",
        )
    lengths = {path.stem: path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: count for name, count in lengths.items() if count > 60} == {}
    assert not any("shellcheck" in path.read_text(encoding="utf-8") for path in files)
    head = "".join(files[0].read_text(encoding="utf-8").splitlines(keepends=True)[1:5])
    assert "It takes no locks, diagnoses nothing" in head
    for tool in (["shellcheck", "-e", "SC2016"], ["shfmt", "-i", "2", "-ci", "-d"]):
        if not (TOOLS / tool[0]).exists():
            pytest.skip(f"no {tool[0]} beside this Python")
        done = subprocess.run([TOOLS / tool[0], *tool[1:], *files], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


def test_a_check_tells_whether_it_would_be_made_again(machine):
    made = script(machine, "--", "train.py", SAFERUN_SET="")
    assert machine.gen_shell("--check", str(made)).stdout == f"{made}: up to date\n"
    made.write_text(
        made.read_text(encoding="utf-8").replace("attempts=3", "attempts=4"), encoding="utf-8"
    )
    done = machine.gen_shell("--check", str(made))
    assert (done.returncode, "would be `attempts=3" in done.stdout) == (1, True)


def test_it_is_not_for_slurm(machine):
    done = machine.gen_shell("--plain", "--slurm", "--", "train.py")
    assert (done.returncode, "--plain is for one machine" in done.stderr) == (2, True)


# --- what the job gets ---------------------------------------------------------------------------


def test_values_and_arguments_survive(machine):
    text = yaml.safe_dump(
        {"schema": 1, "name": "mine", "env": {"MINE": NASTY, "YOURS": "theirs", "LAST": "x"}}
    )
    (machine.cwd / "mine.yaml").write_text(text, encoding="utf-8")
    made = script(
        machine, "--set", "env.LAST=always", "--", "t.py", NASTY, "", profile="./mine.yaml"
    )
    ran = machine.run(["bash", made, NASTY], YOURS=NASTY, LAST=NASTY)
    assert (ran.status, ran.err) == (0, "")
    got = ran.received[0]
    assert got.argv[3:] == ["t.py", NASTY, "", NASTY]
    assert [got.env[name] for name in ("MINE", "YOURS", "LAST")] == [NASTY, NASTY, "always"]


@pytest.mark.parametrize(
    ("exported", "expected"),
    [
        ({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PET_NPROC_PER_NODE": "gpu"}),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_DEVICE_ORDER": None}),
        ({"PET_NPROC_PER_NODE": "2"}, {"PET_NPROC_PER_NODE": "2"}),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": None}),
    ],
    ids=str,
)
def test_what_is_exported_wins(machine, exported, expected):
    made = script(machine, "--", "train.py", profile="h100-llava")
    ran = machine.run(["bash", made], **exported)
    assert {name: ran.received[0].env.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("profile", "variable", "torch", "value"),
    [
        ("h100-nanochat", "TORCHINDUCTOR_FX_GRAPH_CACHE", "__version__ = '2.4.1'", "1"),
        ("h100-nanochat", "TORCHINDUCTOR_FX_GRAPH_CACHE", "__version__ = '2.5.0'", None),
        ("rtx4090", "NCCL_P2P_DISABLE", "class cuda: device_count = lambda: 2", "1"),
        ("rtx4090", "NCCL_P2P_DISABLE", "class cuda: device_count = lambda: 1", None),
    ],
)
def test_a_condition_is_decided_where_it_runs(machine, profile, variable, torch, value):
    made = script(machine, "--", "train.py", profile=profile)
    (machine.tmp / "torch.py").write_text(torch, encoding="utf-8")
    ran = machine.run(["bash", made], PYTHONPATH=str(machine.tmp))
    assert ran.received[0].env.get(variable) == value


# --- when it is tried again ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "started"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 0, ["0", "0 --resume", "1", "1 --resume"]),
        *slow(("raise KeyError('label')", 1, ["0", "1"])),
    ],
)
def test_torchrun_is_started_again_where_a_signal_ended_a_rank(machine, failure, status, started):
    (machine.cwd / "ranks.py").write_text(RANK.format(failure=failure), encoding="utf-8")
    made = script(
        *(machine, "--set", "retry.resume_args=[--resume]"),
        *("--", "--standalone", "--nproc-per-node=2", "ranks.py"),
    )
    ran = machine.run(["bash", made], PATH=f"{TOOLS}:/usr/bin:/bin", OMP_NUM_THREADS="1")
    assert ran.status == status, ran.err
    assert sorted((machine.cwd / "started").read_text(encoding="utf-8").splitlines()) == started
    assert ("ranks.py FAILED" in ran.err, "attempt 2 of 3" in ran.err) == (True, status == 0)


@pytest.mark.parametrize(
    ("launcher", "last", "starts"),
    [("torchrun", 3, 3), ("torchrun", 137, 1), ("python", 139, 3), ("python", 1, 1)],
)
def test_attempts_are_bounded_and_the_status_is_that_of_the_last(machine, launcher, last, starts):
    made = script(machine, "--set", f"launcher={launcher}", "--", "train.py")
    ran = machine.run(["bash", made], ends=[{"status": last}])
    assert ran.status == last
    assert len((machine.records("x") / "all").read_text(encoding="utf-8").splitlines()) == starts


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", *slow("SIGINT", "SIGHUP")])
def test_a_signal_reaches_the_job_once_and_ends_the_script(machine, name):
    job = machine.start(["bash", script(machine, "--", "t.py")], ends=STAYS)
    up(machine)
    job.send_signal(signal.SIGQUIT)  # which does nothing
    job.send_signal(getattr(signal, name))
    assert end(job)[0] == -getattr(signal, name)
    assert signals(machine) == name
    assert len((machine.records("x") / "all").read_text(encoding="utf-8").splitlines()) == 1


def test_a_ctrl_c_reaches_the_job_once(machine):
    made = script(machine, "--", "train.py")
    extra = {"RECORDS": str(machine.records("x")), "ENDS": json.dumps(STAYS)}
    pid, fd = start(["bash", str(made)], machine.cwd, {**machine.environ, **extra})
    up(machine)
    os.write(fd, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    os.close(fd)
    assert signals(machine) == "SIGINT"


def test_a_signal_between_attempts_ends_the_script(machine):
    made = script(machine, "--", "t.py", SAFERUN_SET="retry.backoff_s='[600, 600]'")
    job = machine.start(["bash", made], ends=[{"status": 3}])
    assert job.stderr is not None
    assert any("starts in 600 s" in line for line in iter(job.stderr.readline, ""))
    job.send_signal(signal.SIGQUIT)
    until(lambda: "sleep" in machine.living().values(), "it waits")
    job.terminate()
    assert end(job)[0] == -signal.SIGTERM
    assert machine.living() == {}
