"""The script of `gen-shell --plain`: signals that it gets, and what is left of its job."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from cases import slow
from plain_scripts import KILLED, SEGFAULT, script
from scripts import STAYS, end, signals, until, up
from terminals import read_all, start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", *slow("SIGHUP", "SIGQUIT")])
def test_a_signal_ends_the_job_and_leaves_nothing(machine, name):
    job = machine.start(["bash", script(machine, "--", "t.py")], ends=STAYS)
    up(machine)
    job.send_signal(getattr(signal, name))
    assert end(job)[0] == (-signal.SIGINT if name == "SIGINT" else 9)
    assert signals(machine) == name
    assert list(machine.received("x")) == [1]
    assert machine.living() == {}
    assert list(machine.temporary.iterdir()) == []


def test_a_signal_between_attempts_ends_the_run(machine):
    made = script(machine, "--", "t.py", SAFERUN_SET="retry.backoff_s='[60, 60]'")
    job = machine.start(["bash", made], ends=[SEGFAULT])
    assert job.stderr is not None
    assert any("attempt 2 starts in 60 s" in line for line in iter(job.stderr.readline, ""))
    job.terminate()
    assert end(job)[0] == 128 + signal.SIGTERM
    assert machine.living() == {}
    assert list(machine.received("x")) == [1]


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_a_ctrl_c_reaches_the_job_once_and_leaves_nothing(machine, launcher):
    made = script(machine, "--set", f"launcher={launcher}", "--", "train.py")
    machine.program("python3", (machine.bin / "python").read_text())
    extra = {"RECORDS": str(machine.records("x")), "ENDS": json.dumps(STAYS)}
    pid, fd = start(["bash", str(made)], machine.cwd, {**machine.environ, **extra})
    up(machine)
    os.write(fd, b"\x03")
    output = read_all(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT, output
    os.close(fd)
    assert signals(machine) == "SIGINT"
    assert machine.living() == {}


def test_a_second_signal_kills_what_does_not_end(machine):
    deaf = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\n"
    deaf += "open(place + '/up', 'w').close()\nwhile True: signal.pause()"
    job = machine.start(["bash", script(machine, "--", "t.py")], ends=[{"code": deaf}])
    up(machine)
    job.terminate()
    assert job.poll() is None
    until(lambda: not pending(job.pid, signal.SIGTERM), "bash has got the first")
    job.terminate()
    assert end(job)[0] == 137
    assert machine.living() == {}


def pending(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        sets = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd", "ShdPnd"))]
    return any(bits >> (number - 1) & 1 for bits in sets)


def test_a_killed_launcher_leaves_nothing_to_the_next_attempt(machine):
    """Its worker is in a session of its own, as torchrun's ranks are."""
    look = f"import subprocess; subprocess.call(['pgrep', '-fc', '{machine.mark}'])"
    start = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import signal\\n"
    start += f"while 1: signal.pause()', '{machine.mark}'], start_new_session=True)\n"
    made = script(machine, "--", "t.py")
    ran = machine.run(["bash", made], ends=[{"code": start + KILLED["code"]}, {"code": look}])
    assert (ran.status, ran.out) == (0, "0\n"), ran.err
    assert machine.living() == {}


@pytest.mark.slow
def test_of_a_real_torchrun_that_is_killed_no_rank_is_left(machine):
    (machine.cwd / "ranks.py").write_text(
        "import os, signal, sys, time, torch\n"
        "open(f\"up-{os.environ['RANK']}-{os.environ['SAFERUN_ATTEMPT']}\", 'w').close()\n"
        "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\n"
        "if os.environ['SAFERUN_ATTEMPT'] == '1': time.sleep(600)\n"
    )
    tools = Path(sys.executable).parent
    made = script(machine, "--", "--nproc-per-node=2", "ranks.py")
    job = machine.start(["bash", made], PATH=f"{tools}:/usr/bin:/bin", OMP_NUM_THREADS="1")
    until(lambda: len(list(machine.cwd.glob("up-*-1"))) == 2, "both ranks are up")
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in machine.living()}
    (agent,) = (pid for pid, command in commands.items() if b"/torchrun\0" in command)
    os.kill(agent, signal.SIGKILL)
    status, err = end(job)
    assert status == 0, err
    assert "attempt 1 failed (status 137): signal-9" in err
    assert len(list(machine.cwd.glob("up-*-2"))) == 2
    assert machine.living() == {}


@pytest.mark.slow
def test_a_process_without_the_mark_that_holds_the_output_does_not_hold_the_run(machine):
    options = "env={}, stdout=subprocess.DEVNULL, start_new_session=True"
    started = f"subprocess.Popen(['/usr/bin/sleep', '3600'], {options})"
    code = f"import subprocess; open('pid', 'w').write(str({started}.pid)); {SEGFAULT['code']}"
    ran = machine.run(
        ["bash", "-c", f"bash '{script(machine, '--', 't.py')}' 2>err"], ends=[{"code": code}, {}]
    )
    assert (ran.status, list(ran.received)) == (0, [1, 2]), ran.err
    os.kill(int((machine.cwd / "pid").read_text()), signal.SIGKILL)
