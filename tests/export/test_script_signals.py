"""The script of `gen-shell` under signals, deaths and a person's Ctrl-C."""

from __future__ import annotations

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


def test_a_signal_to_all_at_the_end_leaves_nothing_unpacked(machine):
    """Slurm ends every process of a step where one node's part has failed: this `rm`, too."""
    machine.program("rm", '#!/bin/sh\nkill -TERM $$\nexec /bin/rm "$@"\n')
    job = machine.start(["bash", machine.script("--profile", "cpu", "--", "train.py")])
    assert end(job)[0] == 0
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
    until(lambda: not pending(job.pid, signal.SIGQUIT), "bash has got it")
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
    unpacking = f"case $* in *base64*) : >'{up}'; read line <'{gate}' ;; esac"
    machine.program("python3", f'#!/bin/sh\n{unpacking}\nexec {sys.executable} "$@"\n')
    script = machine.script("--profile", "cpu", "--", "train.py")
    job = machine.start(["bash", script])
    until(up.exists, "it unpacks")
    number = getattr(signal, name)
    job.send_signal(number)
    until(lambda: not pending(job.pid, number), "bash has got the signal")
    gate.write_text("go on\n")
    if name in ("SIGQUIT", "SIGUSR1"):
        assert end(job)[0] == 0
    else:
        assert end(job) == (128 + number, "")
    until(lambda: machine.living() == {}, "all are gone")
    assert machine.unpacked() == []


def pending(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        sets = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd", "ShdPnd"))]
    return any(bits >> (number - 1) & 1 for bits in sets)


@pytest.mark.parametrize("victim", ["bash", "keeper", *slow("kit", "torchrun")])
def test_nothing_lives_on_when_one_process_is_killed(machine, victim):
    script = machine.script("--profile", "cpu", "--retries", "0", "--", "train.py")
    # retries 0 would replace the kit by torchrun; two attempts keep it, and the second ends at once
    job = machine.start(["bash", script], ends=[*STAYS, {}], SAFERUN_RETRIES="1")
    up(machine)
    os.kill(process_of(machine, job, victim), signal.SIGKILL)
    status = end(job)[0]
    until(lambda: machine.living() == {}, "all are gone")
    survives = victim in ("keeper", "torchrun")
    assert status == (0 if survives else -9 if victim == "bash" else 137)
    assert list(machine.received("x")) == ([1, 2] if survives else [1])
    assert (machine.unpacked() == []) is (victim != "bash")


def process_of(machine: Machine, job: subprocess.Popen[str], victim: str) -> int:
    if victim == "bash":
        return job.pid
    if victim == "torchrun":
        return machine_record(machine)["pid"]
    if victim == "keeper":
        (keeper,) = [p for p, n in machine.living().items() if n == "saferun-keeper"][:1]
        return keeper
    children = open_children(job.pid)
    assert len(children) == 1
    return children[0]


def machine_record(machine: Machine) -> dict:
    return json.loads((machine.records("x") / "1.json").read_text())


def open_children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_without_retries_it_is_torchruns_own_behaviour_and_cleans_up_behind_it(machine):
    script = machine.script("--profile", "cpu", "--retries", "0", "--", "train.py")
    with machine.start(["bash", script], ends=STAYS) as job:
        up(machine)
        job.terminate()
        assert job.wait() == 9
        assert signals(machine) == "SIGTERM"
        assert machine.unpacked() == []
        for pid in machine.living():  # what a plain torchrun would leave
            os.kill(pid, signal.SIGKILL)


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
