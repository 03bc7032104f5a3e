"""A warm agent becomes what a launcher started now would be, or leaves no trace."""

import contextlib
import json
import os
import pty
import signal
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from helpers import PROGRAMS, children, has_signal, parent, stat_of, until, warm_agent_of
from sandbox import python_program, text_of, write
from warm_jobs import FAKE_RUN, PROGRAM, QuickLauncher, used

from saferun.supervise.attempt.attempt_runner import run_attempt
from saferun.supervise.attempt.attempt_values import AttemptSpec
from saferun.supervise.ready.keeper_pool import start_keeper

FACTS = text_of(PROGRAMS / "launcher_facts.py")


@pytest.fixture
def launcher(tmp_path: Path) -> QuickLauncher:
    return QuickLauncher(tmp_path)


def test_job_finds_what_a_fresh_launcher_would_have_found(launcher):
    fresh, warmed = launcher.both(
        FACTS, "--nnodes=1", "train.py", "ä \udcff", env={"NCCL_DEBUG": "X"}
    )
    facts, others = json.loads(fresh.out), json.loads(warmed.out)
    assert others == facts
    assert facts["argv"][1:3] == ["--nnodes=1", "train.py"]


def test_arguments_and_environment_are_those_of_the_handover(launcher):
    body = "import os, sys; print(sys.argv[1:], os.environ['NCCL_P2P'], os.environ.get('PET_A'))"
    ahead = {"imports": 1, "env": {"NCCL_P2P": "0", "PET_A": "1"}}
    with launcher.run(body, "later.py", warm_agent=ahead, env={"NCCL_P2P": "1"}) as run:
        run.ended()
    assert used(run)
    assert run.out == b"['later.py'] 1 None\n"


@pytest.mark.parametrize("flags", ["", "P"] if sys.version_info >= (3, 11) else [""])
def test_module_launcher_becomes_what_python_m_would_be(launcher, flags):
    write(launcher.torch / "run.py", FAKE_RUN + 'if __name__ == "__main__": main()\n')
    python = [sys.executable, *(["-" + flags] if flags else [])]
    command = [*python, "-m", "torch.distributed.run", "train.py"]
    runs = []
    for ahead in ({}, {"warm_agent": {"imports": 1, "flags": flags}}):
        with launcher.run(FACTS, command=command, popen={"cwd": launcher.folder}, **ahead) as run:
            run.ended()
            runs.append(json.loads(run.out))
    for facts in runs:
        facts.pop("hook")
        facts["cmdline"] = facts["cmdline"].replace("\\x00", " ").rstrip(" '")
    assert runs[0] == runs[1]
    assert runs[0]["argv"] == [str(launcher.torch / "run.py"), "train.py"]
    assert b"RuntimeWarning" not in run.err


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param({"imports": 1, "kill": True}, id="killed"),
        pytest.param({"interpreter": "/nowhere/python"}, id="cannot start"),
        pytest.param({"env": {"LD_DEBUG_OUTPUT": "/x"}, "imports": 1}, id="other loader"),
        pytest.param({"env": {"PYTHONHASHSEED": "5"}, "imports": 1}, id="other Python"),
        pytest.param({"env": {"OMP_NUM_THREADS": "7"}, "imports": 1}, id="other threads"),
        pytest.param({"flags": "c"}, id="dies at once"),
    ],
)
def test_command_is_started_afresh_and_silently_without_a_usable_agent(launcher, ahead):
    with launcher.run("print('job')", warm_agent=ahead) as run:
        ended = run.ended()
    if ahead.get("imports"):
        assert len(run.members("imported")) == 2
        assert run.members("imported")[1:] == run.members("job")
    assert len(run.members("job")) == 1
    assert (ended["exit_code"], run.out, run.err) == (0, b"job\n", b"")


def test_warm_agent_whose_import_fails_prints_nothing(launcher):
    once = "import sys\nif os.environ.get('NCCL_ONCE'): print('broken'); sys.exit('no torch')"
    ahead = {"imports": 1, "env": {"NCCL_ONCE": "1"}}
    with launcher.run("print('job')", warm_agent=ahead, env={"AT_IMPORT": once}) as run:
        ended = run.ended()
    assert (ended["exit_code"], run.out, run.err) == (0, b"job\n", b"")


def test_warm_agent_that_still_imports_is_waited_for(launcher):
    wait = "import time\nwhile not os.path.exists(os.environ['BODY'] + '.go'): time.sleep(0.01)"
    with launcher.run("print('job')", warm_agent={"imports": 1}, env={"AT_IMPORT": wait}) as run:
        run.arrived(imported=1)
        assert not run.members("job")
        Path(f"{launcher.body}.go").touch()
        run.ended()
    assert used(run)
    assert run.out == b"job\n"


OTHERS = sorted(Path.home().glob(".pyenv/versions/3.[19]*/bin/python"))  # 3.9 and later


@pytest.mark.parametrize("python", OTHERS, ids=lambda path: path.parts[-3])
def test_launcher_may_have_any_python(launcher, python):
    launcher.program("torchrun", python_program(PROGRAM, python=python))
    body = FACTS.replace('"orig_argv": sys.orig_argv,', "")
    fresh, warmed = launcher.both(body, "t.py", warm_agent={"interpreter": str(python)})
    facts, others = json.loads(fresh.out), json.loads(warmed.out)
    assert others == facts
    assert facts["executable"] == str(python)


@pytest.mark.parametrize("kilobytes", [0, 300], ids=["small", "a task larger than a pipe"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_signal_while_the_agent_still_imports_ends_the_job(launcher, number, kilobytes):
    stuck = "import time\nos.environ.get('NEVER') or time.sleep(1000)"
    env = {f"BIG{n}": "x" * 100_000 for n in range(kilobytes // 100)}
    env["AT_IMPORT"] = stuck
    with launcher.run("print('job')", warm_agent={"imports": 1}, env=env) as run:
        run.arrived(imported=1)
        until(lambda: _handed(run))
        run.kill("saferun", number)
        ended = run.ended()
    assert not run.members("job")
    assert ended["exit_code"] == 128 + number
    assert ended["forwarded"] == [number.name]


def _handed(run) -> bool:
    # What tells from outside: saferun blocks the signals that it forwards from then on.
    return has_signal(run.process.pid, "SigBlk", signal.SIGTERM)


def test_what_the_import_prints_arrives_once_and_first(launcher):
    loud = "os.write(1, b'one\\n' * 50000); os.write(2, b'two\\n'); print('three')"
    fresh, warmed = launcher.both("print('job')", env={"AT_IMPORT": loud})
    assert (warmed.out, warmed.err) == (fresh.out, fresh.err)
    assert warmed.out.endswith(b"one\nthree\njob\n")


@pytest.mark.parametrize("append", [False, True], ids=["written", "appended"])
def test_nothing_is_written_to_a_file_before_the_job_begins(launcher, append):
    log = launcher.folder / "log"
    flags = os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0)
    fd = os.open(log, flags)
    popen = {"stdout": fd, "stderr": fd}
    first = (
        "import os, time; print('job')\n"
        "while not os.path.exists(os.environ['BODY'] + '.go'): time.sleep(0.01)"
    )
    nexts = {"imports": 2}
    loud = "print('import')"
    with launcher.run(first, popen=popen, next_agent=nexts, env={"AT_IMPORT": loud}) as run:
        run.arrived(imported=2, job=1)
        agent_waits(run)
        assert log.read_bytes().count(b"import\n") <= 1
        Path(f"{launcher.body}.go").touch()
        ended = run.ended()
        run.nothing_lives()
    os.close(fd)
    assert log.read_bytes().count(b"import\n") == 1
    assert ended["tails"][0].encode() == log.read_bytes()


def test_end_of_a_file_that_is_kept_begins_at_the_handover(launcher):
    fd = os.open(launcher.folder / "log", os.O_RDWR | os.O_CREAT)
    ahead = {"imports": 1, "go": f"{launcher.body}.go"}
    with launcher.run("print('job')", popen={"stdout": fd, "stderr": fd}, warm_agent=ahead) as run:
        run.arrived(imported=1)
        os.write(fd, b"of the attempt before\n")
        Path(f"{launcher.body}.go").touch()
        assert run.ended()["tails"][0] == "job\n"
    os.close(fd)
    assert used(run)


def agent_waits(run) -> int:
    """Wait for the warm agent of the next attempt to block; return its pid."""
    keepers = until(
        lambda: [p for p in children(run.process.pid) if _has_warm_agent(p)], "no warm agent"
    )
    pid = warm_agent_of(keepers[0])
    until(lambda: Path(f"/proc/{pid}/wchan").exists() and stat_of(pid)[0] == "S")
    return pid


def _has_warm_agent(keeper: int) -> bool:
    names = []
    for pid in children(keeper):
        with contextlib.suppress(OSError):
            names.append(text_of(Path(f"/proc/{pid}/comm")).strip())
    return "saferun-warm" in names


@pytest.mark.parametrize("what", ["saferun", "its keeper", "running keeper", "job"])
def test_warm_agent_outlives_nobody_whom_it_should_not(launcher, what):
    stay = "import signal\nwhile True: signal.pause()"
    with launcher.run(stay, next_agent={"imports": 2}) as run:
        run.arrived(imported=2, job=1)
        ahead = agent_waits(run)
        keeper = parent(ahead)
        running = parent(run.members("job")[0])
        victims = {"saferun": run.process.pid, "its keeper": keeper, "running keeper": running}
        os.kill(victims.get(what, run.members("job")[0]), signal.SIGKILL)
        until(lambda: ahead not in run.living())
        if what == "its keeper":
            assert run.members("job")[0] in run.living()
            run.kill("saferun", signal.SIGTERM)
        run.nothing_lives()


def test_standby_that_died_is_replaced(launcher):
    standby = start_keeper()
    os.kill(standby.pid, signal.SIGKILL)
    until(lambda: stat_of(standby.pid)[0] == "Z")
    ended = run_attempt(AttemptSpec(["true"], dict(os.environ)), standby=standby)
    assert (ended.exit_code, ended.ended_by) == (0, "job")


def test_modules_in_the_working_directory_shadow_nothing(launcher):
    place = launcher.folder / "cwd"
    place.mkdir()
    for name in ("random", "os", "marshal", "torch", "socket", "typing", "importlib", "posix"):
        write(place / f"{name}.py", "raise SystemExit('shadowed')")
    with launcher.run("print('job')", popen={"cwd": place}, warm_agent={"imports": 1}) as run:
        run.ended()
    assert used(run)
    assert (run.out, run.err) == (b"job\n", b"")


def test_input_is_the_running_attempts(launcher):
    body = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    with launcher.run(body, popen={"stdin": -1}, next_agent={"imports": 2}) as run:
        run.arrived(imported=2, job=1)
        agent_waits(run)
        lines = b"".join(b"%d\n" % i for i in range(20000))
        run.process.stdin.write(lines)
        run.process.stdin.close()
        run.process.stdin = None
        run.ended()
    assert run.out == lines


def test_window_has_the_size_that_it_has_at_the_handover(launcher):
    ours, theirs = pty.openpty()
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 20, 70, 0, 0))
    body = "import os; open(os.environ['BODY'] + '.size', 'w').write(str(os.get_terminal_size(1)))"
    popen = {"stdout": theirs, "stderr": theirs}
    ahead = {"imports": 1, "go": f"{launcher.body}.go"}
    with launcher.run(body, popen=popen, warm_agent=ahead) as run:
        run.arrived(imported=1)
        ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 33, 99, 0, 0))
        Path(f"{launcher.body}.go").touch()
        until(lambda: run.process.poll() is not None)
    os.close(theirs)
    os.close(ours)
    assert used(run)
    assert text_of(Path(f"{launcher.body}.size")) == "os.terminal_size(columns=99, lines=33)"
