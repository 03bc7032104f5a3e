"""The script of `gen-shell` under signals and a person's Ctrl-C.

What the loop does about signals and deaths is tested where it runs live, in tests/faults: the
script becomes that process by `exec`.
"""

import fcntl
import json
import os
import signal
import sys

import pytest
from cases import slow
from helpers import until
from sandbox import shell, shell_program
from scripts import STAYS, end, signals, up
from terminals import read_all, start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", *slow("SIGINT", "SIGHUP", "SIGQUIT")])
def test_a_signal_while_the_kit_is_unpacked_leaves_nothing(machine, name):
    gate, up = machine.folder / "gate", machine.folder / "unpacking"
    os.mkfifo(gate)
    machine.program("torchrun", "#!/bin/sh\n")  # no python: the one on PATH unpacks
    waits = f": >{shell(up)}; {{ read line <{shell(gate)}; }} 2>/dev/null"
    unpacking = f"case $* in *base64*) {waits} ;; esac"
    machine.program("python3", shell_program(sys.executable, before=unpacking))
    script = machine.script("--profile", "cpu", "--", "train.py")
    job = machine.start(["bash", script])
    until(up.exists, "it unpacks")
    number = getattr(signal, name)
    if name == "SIGINT":  # a key at the terminal, which sends it to all
        os.killpg(job.pid, number)
    else:
        job.send_signal(number)
        gate.write_text("go on\n", encoding="utf-8")
    status, err = end(job)
    if name in ("SIGQUIT", "SIGUSR1"):
        assert status == 0
    else:
        assert (status, err) == (-number, "")
    until(lambda: machine.living() == {}, "all are gone")
    assert machine.unpacked() == []


def test_without_retries_torchrun_replaces_it_and_the_next_script_cleans_up(machine):
    script = machine.script("--profile", "cpu", "--retries", "0", "--", "train.py")
    with machine.start(["bash", script], ends=STAYS) as job:
        up(machine)
        job.terminate()
        assert job.wait() == 9
        assert signals(machine) == "SIGTERM"
        record = machine.records("x") / "0.json"
        assert json.loads(record.read_text(encoding="utf-8"))["pid"] == job.pid
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


@pytest.mark.parametrize("options", ["monitor", *slow("")])
def test_a_ctrl_c_reaches_the_job_once_and_the_terminal_stays_one(machine, options):
    script = machine.script("--profile", "cpu", "--", "train.py")
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
    # A shell's loop stops where a command dies of SIGINT itself.
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT, output
    assert signals(machine) == "SIGINT"
    assert machine.living() == {}
