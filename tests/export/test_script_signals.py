"""The script of `gen-shell` under signals, deaths and a person's Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from cases import slow
from scripts import STAYS, Machine, end, signals, until, up
from terminals import read_all, start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", *slow("SIGHUP")])
def test_a_signal_asks_the_job_to_end_once_and_nothing_is_tried_again(machine, name):
    script = machine.script("--profile", "cpu", "--set", "watch.mode=off", "--", "train.py")
    job = machine.start(["bash", script], ends=STAYS)
    up(machine)
    job.send_signal(signal.SIGQUIT)  # which ends nothing
    job.send_signal(getattr(signal, name))
    # A shell's loop stops where a command dies of SIGINT itself.
    assert end(job)[0] == (-signal.SIGINT if name == "SIGINT" else 9)
    assert signals(machine) == name
    assert list(machine.received("x")) == [1]
    assert machine.living() == {}
    assert machine.unpacked() == []


def test_a_user_signal_reaches_the_job_which_goes_on(machine):
    script = machine.script("--profile", "cpu", "--", "train.py")
    job = machine.start(["bash", script], ends=STAYS)
    up(machine)
    job.send_signal(signal.SIGUSR1)
    until(lambda: signals(machine) == "SIGUSR1", "USR1 has come")
    job.send_signal(signal.SIGUSR2)
    until(lambda: signals(machine) == "SIGUSR1 SIGUSR2", "USR2 has come")
    assert job.poll() is None
    job.terminate()
    assert end(job)[0] == 9


def test_near_the_time_limit_the_job_is_told_and_no_other_attempt_begins(machine):
    """As a script for Slurm tells each node; a killed launcher would be tried again."""
    script = machine.script("--profile", "cpu", "--", "train.py")
    job = machine.start(["bash", script], ends=[*STAYS, {}])
    up(machine)
    job.send_signal(signal.SIGURG)
    until(lambda: signals(machine) == "SIGUSR2", "USR2 has come")
    os.kill(machine_record(machine)["pid"], signal.SIGKILL)
    status, err = end(job)
    assert status == 128 + signal.SIGTERM, err
    assert list(machine.received("x")) == [1]
    assert machine.living() == {}


def test_a_signal_between_attempts_ends_the_run(machine):
    script = machine.script("--profile", "cpu", "--", "train.py")
    busy = {
        "stderr": "huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Service Unavailable\n"
    }
    job = machine.start(
        ["bash", script], ends=[{**busy, "status": 1}], SAFERUN_SET="retry.backoff_s='[60, 60]'"
    )
    assert job.stderr is not None
    lines = iter(job.stderr.readline, "")
    assert any("attempt 2 starts in" in line for line in lines)
    job.send_signal(signal.SIGQUIT)  # which ends nothing
    until(lambda: not pending(job.pid, signal.SIGQUIT), "it has come")
    job.send_signal(signal.SIGTERM)
    status, err = end(job)
    assert status == 128 + signal.SIGTERM, err
    assert list(machine.received("x")) == [1]
    assert machine.living() == {}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_signal_while_the_kit_is_unpacked_leaves_nothing(machine, name):
    gate, up = machine.tmp / "gate", machine.tmp / "unpacking"
    os.mkfifo(gate)
    machine.program("torchrun", "#!/bin/sh\n")  # no python: the one on PATH unpacks
    unpacking = f"case $* in *base64*) : >'{up}'; {{ read line <'{gate}'; }} 2>/dev/null ;; esac"
    machine.program("python3", f'#!/bin/sh\n{unpacking}\nexec {sys.executable} "$@"\n')
    script = machine.script("--profile", "cpu", "--", "train.py")
    job = machine.start(["bash", script])
    until(up.exists, "it unpacks")
    number = getattr(signal, name)
    if name == "SIGINT":  # a key at the terminal, which sends it to all
        os.killpg(job.pid, number)
    else:
        job.send_signal(number)
        gate.write_text("go on\n")
    status, err = end(job)
    if name in ("SIGQUIT", "SIGUSR1"):
        assert status == 0
    else:
        assert (status, err) == (-number, "")
    until(lambda: machine.living() == {}, "all are gone")
    assert machine.unpacked() == []


def pending(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        sets = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd", "ShdPnd"))]
    return any(bits >> (number - 1) & 1 for bits in sets)


@pytest.mark.parametrize("victim", ["supervisor", "keeper", *slow("torchrun")])
def test_nothing_lives_on_when_one_process_is_killed(machine, victim):
    script = machine.script("--profile", "cpu", "--retries", "0", "--", "train.py")
    # retries 0 would replace the script by torchrun; of two attempts the second ends at once
    job = machine.start(["bash", script], ends=[*STAYS, {}], SAFERUN_RETRIES="1")
    up(machine)
    os.kill(process_of(machine, job, victim), signal.SIGKILL)
    status = end(job)[0]
    until(lambda: machine.living() == {}, "all are gone")
    survives = victim in ("keeper", "torchrun")
    assert status == (0 if survives else -9)
    assert list(machine.received("x")) == ([1, 2] if survives else [1])
    assert (machine.unpacked() == []) is survives


def process_of(machine: Machine, job: subprocess.Popen[str], victim: str) -> int:
    if victim == "supervisor":
        return job.pid  # the script's shell has become it
    if victim == "torchrun":
        return machine_record(machine)["pid"]
    (keeper,) = [p for p, n in machine.living().items() if n == "saferun-keeper"][:1]
    return keeper


def machine_record(machine: Machine) -> dict:
    return json.loads((machine.records("x") / "1.json").read_text())


def test_without_retries_torchrun_replaces_it_and_the_next_script_cleans_up(machine):
    script = machine.script("--profile", "cpu", "--retries", "0", "--", "train.py")
    with machine.start(["bash", script], ends=STAYS) as job:
        up(machine)
        job.terminate()
        assert job.wait() == 9
        assert signals(machine) == "SIGTERM"
        record = machine.records("x") / "0.json"
        assert json.loads(record.read_text())["pid"] == job.pid
        for pid in machine.living():  # what a plain torchrun would leave
            os.kill(pid, signal.SIGKILL)
    (old,) = machine.unpacked()
    os.utime(machine.temporary / old, (0, 0))
    kept = machine.temporary / "saferun-kit.held"
    kept.mkdir()
    os.utime(kept, (0, 0))
    holder = os.open(kept, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    assert machine.run(["bash", script], ends=[{}]).status == 0
    os.close(holder)
    assert old not in machine.unpacked()
    assert kept.name in machine.unpacked()


@pytest.mark.parametrize(
    ("launcher", "options"),
    [("torchrun", ""), ("python", ""), ("torchrun", "monitor")],
    ids=["torchrun", "python", "job control on"],
)
def test_a_ctrl_c_reaches_the_job_once_and_the_terminal_stays_one(machine, launcher, options):
    script = machine.script("--profile", "cpu", "--set", f"launcher={launcher}", "--", "train.py")
    tty = "print('tty', sys.stdout.isatty(), sys.stdin.isatty(), flush=True)\n"
    ends = json.dumps([{"code": tty, **STAYS[0]}])
    environ = {**machine.environ, "RECORDS": str(machine.records("x")), "ENDS": ends}
    environ |= {"SHELLOPTS": options} if options else {}
    pid, fd = start(["bash", str(script)], machine.cwd, environ)
    up(machine)
    os.write(fd, b"\x03")
    output = read_all(fd)
    status = os.waitpid(pid, 0)[1]
    os.close(fd)
    assert "tty True True" in output
    own = 9 if launcher == "python" else -signal.SIGINT  # torchrun has 1 whatever its job had
    assert os.waitstatus_to_exitcode(status) == own, output
    assert signals(machine) == "SIGINT"
    assert machine.living() == {}
