"""Ctrl-C, and signals that ask a run to end: answered at once, and as a shell expects it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import children, has_signal, is_alive, until
from runs import program, run, small_torchrun
from sandbox import SAFERUN, Sandbox, shell
from terminals import QUIET_S, Terminal

OPTIONS = ["--profile=cpu", "--set=preflight.mode=off"]
ANSWER = rb"saferun: asked the job to end \(up to 40 s\); Ctrl-C again kills it\r\n"


class Person(Terminal):
    """Who types commands in a directory; the job is `saves_when_asked`, under a small torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = Sandbox(folder, **small_torchrun(folder))
        super().__init__(self.machine.environ)
        self.type(f"{shell('cd', folder)}\n", rb"READY\$ ")

    def job(self) -> str:
        """Return the command that runs the job."""
        return shell(*SAFERUN, *OPTIONS, program("saves_when_asked"), self.folder)

    def sees(self, name: str) -> str:
        """Wait for a file of the job's, while there is one; return its lines."""
        path = self.folder / name
        began = time.monotonic()

        def text() -> str:
            ended = time.monotonic() - began > QUIET_S and not children(self.pid)
            found = path.read_text(encoding="utf-8") if path.exists() else ""
            assert found or not ended, f"no {name}, and nothing runs"
            return found

        return until(text, name)

    def lets_it_end(self) -> None:
        (self.folder / "gate").touch()

    def leave(self) -> None:
        self.machine.close()
        self.end()


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    one = Person(tmp_path)
    yield one
    one.leave()


@pytest.mark.parametrize("loop", ["typed", "script"])
def test_ctrl_c_is_answered_lets_the_job_end_and_stops_a_shells_loop(person, loop):
    line = f"for i in 1 2 3; do {person.job()}; echo went-$i; done"
    if loop == "script":
        (person.folder / "loop.sh").write_text(line + "\n", encoding="utf-8")
        line = "bash loop.sh"
    person.type(line + "\n")
    person.sees("up")
    person.type("\x03", ANSWER)
    person.sees("asked")
    person.lets_it_end()
    seen = person.expect(rb"(?s)(.*)READY\$ ")[1]
    assert len(person.sees("up").splitlines()) == 1
    assert person.sees("asked") == person.sees("up")
    assert b"went-1" not in seen
    person.type("echo status=$?\n", rb"status=130")
    assert person.sees("saved") == person.sees("up")


def test_a_second_ctrl_c_kills_the_job(person):
    person.type(person.job() + "\n")
    job = int(person.sees("up"))
    person.type("\x03", ANSWER)
    person.sees("asked")
    # What follows sooner than 0.1 s counts as the same keypress: the first of these is taken.
    until(lambda: not is_alive(job) or person.type("\x03"), "the job has ended")
    person.expect(rb"READY\$ ")
    assert not (person.folder / "saved").exists()


def test_kill_int_ends_a_run_in_the_foreground(person):
    person.type(person.job() + "\n")
    person.sees("up")
    (pid,) = [pid for pid in person.machine.living() if command(pid)[1:3] == ["-m", "saferun"]]
    os.kill(pid, signal.SIGINT)
    person.expect(ANSWER)
    person.sees("asked")
    person.lets_it_end()
    person.expect(rb"READY\$ ")
    assert person.sees("saved") == person.sees("up")


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
    except OSError:
        return []


FAILS = """
import sys
print("huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Service Unavailable")
sys.exit(1)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_a_backoff_ends_the_run_with_last_words_and_sigusr1_does_not(tmp_path, name):
    (tmp_path / "t.py").write_text(FAILS, encoding="utf-8")
    argv = [*OPTIONS, "--set=retry.backoff_s=[600, 600]", str(tmp_path / "t.py")]
    with run(tmp_path, *argv, env=small_torchrun(tmp_path)) as job:
        job.wait_for_message("attempt 2 starts in")
        job.process.send_signal(signal.SIGUSR1)
        until(
            lambda: not has_signal(job.process.pid, "SigPnd|ShdPnd", signal.SIGUSR1),
            "it is handled",
        )
        job.process.send_signal(getattr(signal, name))
        status = job.end()
        assert status == (-signal.SIGINT if name == "SIGINT" else 128 + signal.SIGTERM)
        assert job.events("end")[0]["status"] == 128 + getattr(signal, name)
        messages = job.messages()
        assert any("the run failed: " in line for line in messages), job.err
        assert f"saferun: not tried again: {name} asked for the end" in messages
        assert messages[-1] == f"saferun: journal: {job.journal}"


TOLD = """
import os, signal, time
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"told\\n"))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""


def test_near_the_time_limit_the_job_is_told_and_no_other_attempt_begins(tmp_path):
    """A script for Slurm sends SIGURG to each node; a killed job would be tried again otherwise."""
    with run(tmp_path, *OPTIONS, "--set=launcher=python", "-c", TOLD) as job:
        pid = int(job.process.stdout.readline())
        job.process.send_signal(signal.SIGURG)
        assert job.process.stdout.readline() == b"told\n"
        os.kill(pid, signal.SIGKILL)
        assert job.end() == 128 + signal.SIGTERM, job.err
        assert len(job.events("attempt")) == 1
        job.nothing_lives()
