"""At a terminal: a real shell with job control in a pty, and a person's keys."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import COMMON, agent, python, stat_of, until
from sandbox import shell
from supervised import Supervised
from terminals import Terminal

TICK = "\nfor i in range(100000): print('tick', i, flush=True); time.sleep(0.05)"


class Typed(Supervised):
    """A supervised command that was started by typing it in a terminal."""

    def popen(self, *command: object, replace: bool = False) -> None:
        self.terminal = Terminal(self.environ)
        script = self.folder / "run.sh"
        script.write_text(f"exec {shell(*command)}\n", encoding="utf-8")
        self.terminal.type(f"{shell('.' if replace else 'bash', script)}\n")

    def close(self) -> None:
        super().close()
        self.terminal.end()

    def status(self) -> int:
        """Return the exit status that the shell saw."""
        self.terminal.type("echo status=$?\n")
        return int(self.terminal.expect(rb"status=(\d+)")[1])


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Callable[..., Typed]]:
    runs: list[Typed] = []

    def start(command: list[str], **options: Any) -> Typed:
        runs.append(Typed(tmp_path, command, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def ticking(prefix: str = "") -> list[str]:
    return agent(COMMON + prefix + "join('rank')" + TICK)


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_interrupt_key_reaches_a_command_in_our_own_group_once(typed, launcher):
    code = COMMON + "note('SIGINT'); join('agent')" + TICK
    run = typed(python(code), launcher=launcher, no_python=True)
    run.terminal.expect(rb"tick 3")
    run.terminal.type("\x03")
    run.arrived(SIGINT=1)
    run.terminal.expect(rb"tick")
    run.terminal.type("\x1c")  # SIGQUIT, which ends it
    run.terminal.expect(rb"READY\$ ")
    assert run.status() == 131
    assert len(run.members("SIGINT")) == 1


def test_interrupt_key_reaches_each_of_several_workers_once(typed, tmp_path):
    code = COMMON + "signal.signal(signal.SIGINT, lambda *_: join('heard'))\n"
    code += "signal.signal(signal.SIGQUIT, lambda *_: sys.exit(0))\njoin('worker')\nstay()\n"
    saferun = [sys.executable, "-m", "saferun", "--profile=cpu", "--set=launcher=python"]
    environment = {"SAFERUN_RUN_DIR": str(tmp_path / "runs")}
    run = typed(
        [*python(code)[1:]], plain=[*saferun, "--set=workers=3"], popen={"env": environment}
    )
    run.arrived(worker=3)
    run.terminal.type("\x03")
    run.arrived(heard=3)
    run.terminal.type("\x1c")  # SIGQUIT, which ends them
    run.terminal.expect(rb"READY\$ ")
    assert run.status() == 0
    assert len(run.members("heard")) == 3
    assert set(run.living()) == {run.terminal.pid}


@pytest.mark.parametrize(("launcher", "status"), [("torchrun", 1), ("python", 130)])
def test_a_job_stops_and_goes_on_as_without_us(typed, launcher, status):
    plain = python(COMMON + "join('agent')" + TICK)
    run = typed(ticking() if launcher == "torchrun" else plain, launcher=launcher)
    run.terminal.expect(rb"tick 3")
    run.terminal.type("\x1a", rb"Stopped", rb"READY\$ ")
    if launcher == "torchrun":  # ranks are sessions of their own: they go on meanwhile
        run.terminal.expect(rb"(?s)tick \d+.*tick \d+")
    else:
        until(lambda: stat_of(run.pid("agent"))[0] == "T")
    run.terminal.type("fg\n")
    until(run.terminal.has_job)
    run.terminal.expect(rb"tick (\d+)")
    run.terminal.type("\x03", rb"READY\$ ")
    assert run.status() == status


def test_stopped_job_can_be_ended_by_the_shell(typed):
    run = typed(ticking())
    run.terminal.expect(rb"tick 3")
    run.terminal.type("\x1a", rb"Stopped")
    run.terminal.type("kill %1\n")
    until(lambda: set(run.living()) == {run.terminal.pid})


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_breakpoint_works(typed, launcher):
    code = COMMON + "import sys; x = 41\nbreakpoint()\nprint('after', x); sys.exit(0)"
    command = agent(code, 1) if launcher == "torchrun" else python(code)
    run = typed(command, launcher=launcher)
    run.terminal.expect(rb"\(Pdb\) ")
    run.terminal.type("p x + 1\n", rb"42", rb"\(Pdb\) ")
    run.terminal.type("c\n", rb"after 41", rb"READY\$ ")
    assert run.status() == 0


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_new_window_size_reaches_the_job(typed, launcher):
    code = (
        COMMON
        + """
note('SIGWINCH')
while True: print('size', *os.get_terminal_size(), flush=True); time.sleep(0.05)
"""
    )
    command = agent(code, 1) if launcher == "torchrun" else python(code)
    run = typed(command, launcher=launcher)
    run.terminal.resize(33, 111)
    run.terminal.expect(rb"size 111 33")
    run.terminal.resize(44, 99)
    run.terminal.expect(rb"size 99 44")
    if launcher == "python":
        run.arrived(SIGWINCH=1)


def test_settings_of_the_terminal_survive_a_job_that_was_killed_while_it_had_changed_them(typed):
    code = COMMON + "import tty; tty.setraw(0); join('agent'); os.kill(os.getpid(), 9)"
    run = typed(python(code))
    run.arrived(agent=1)
    run.terminal.expect(rb"READY\$ ")
    run.terminal.type("stty -a\n")
    assert b" icanon" in run.terminal.expect(rb"[ -]icanon")[0]
    run.terminal.expect(rb" echo ")


def test_terminal_that_closes_ends_the_job(typed):
    run = typed(ticking())
    run.terminal.expect(rb"tick 3")
    run.terminal.close()
    until(lambda: set(run.living()) <= {run.terminal.pid})
    assert len(run.members("heard-1")) == 1


def test_job_under_nohup_outlives_its_terminal(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # nohup.out is written there
    run = typed(agent(COMMON + "join('r'); stay()", 1), prefix=["nohup"])
    run.arrived(agent=1, r=1)
    run.terminal.close()
    os.waitid(os.P_PID, run.terminal.pid, os.WEXITED | os.WNOWAIT)
    assert {run.pid("agent"), run.pid("r")} <= set(run.living())
    assert not run.members("heard-1")


def test_background_job_is_not_stopped_for_its_output(typed):
    run = typed(ticking(), prefix=["bash", "-c", 'stty tostop; "$@"', "-"])
    run.terminal.expect(rb"tick 3")
    run.terminal.type("\x1a", rb"Stopped")
    run.terminal.type("bg\n", rb"tick (\d+)", rb"tick (\d+)")
    run.terminal.type("kill %1\n")
    until(lambda: set(run.living()) == {run.terminal.pid})
