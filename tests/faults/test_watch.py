"""`saferun runs watch` beside real runs: it sees them, draws them, and does nothing to them."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import is_alive, until
from runs import PYTHON, Run, ran, run
from terminals import Terminal

HOSTILE = r"\x1b[2J\x9b31m [red]it is[/red] [/bold"
JOB = (
    "import os, sys, time\n"
    "for n in range(int(sys.argv[2])):\n"
    f"    print('step', n, '{HOSTILE}', flush=True)\n"
    "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\n"
    "sys.exit(len(sys.argv) > 3)\n"
)
WATCH = [sys.executable, "-m", "saferun", "runs", "watch", "--interval=0.2"]
TYPED = f"TERM=xterm {shlex.join(WATCH)}; echo ended=$?\n"


@contextlib.contextmanager
def working(folder: Path, *more: str, **options: object) -> Iterator[Run]:
    """A run of another terminal, which ends when the file `go` is there."""
    with run(folder, *PYTHON, "-c", JOB, str(folder / "go"), "8", *more, **options) as job:
        until(lambda: list(job.home.glob(".local/state/saferun/runs/*/events.jsonl")), "a run")
        until(lambda: job.events("started"), "the attempt")
        yield job


@contextlib.contextmanager
def shell_of(job: Run) -> Iterator[Terminal]:
    """A terminal of 30 lines and 100 columns."""
    terminal = Terminal(job.environ)
    try:
        terminal.resize(30, 100)
        yield terminal
    finally:
        terminal.end()


def test_ctrl_c_ends_the_watching_and_leaves_the_run_alone(tmp_path):
    """What the job writes reaches the terminal neither as control characters nor as markup."""
    with working(tmp_path) as job:
        with shell_of(job) as terminal:
            terminal.type(TYPED)
            terminal.expect(rb"\x1b\[\?1049h")  # the second screen
            seen = terminal.expect(rb"output[^\n]*step 7 ([^\n]*?)/bold")[1]
            terminal.type("\x03", rb"\x1b\[\?1049l", rb"ended=130")
        assert b"?[2J" in seen
        assert b"[red]it is[/red]" in seen
        assert b"\x1b[2J" not in seen
        assert is_alive(job.process.pid)
        assert job.events("started")[-1]["event"] == "started"
        (tmp_path / "go").touch()
        assert job.end() == 0, job.err
        assert [event["status"] for event in job.events("ended")] == [0]
        assert job.events("ended")[0].get("signals", []) == []


def test_q_ends_the_watching_with_status_0_and_the_terminal_is_as_before(tmp_path):
    with working(tmp_path) as job, shell_of(job) as terminal:
        before = termios.tcgetattr(terminal.fd)
        terminal.type(TYPED, rb"q or Ctrl-C ends the watching")
        terminal.type("\x1a")  # Ctrl-Z
        terminal.expect(rb"(?s)\x1b\[\?1049l.*Stopped.*READY\$ ")
        assert termios.tcgetattr(terminal.fd) == before
        terminal.type("fg\n", rb"q or Ctrl-C ends the watching")
        terminal.type("xq", rb"\x1b\[\?1049l", rb"READY\$ ")
        assert termios.tcgetattr(terminal.fd) == before
        terminal.type("echo status=$?\n", rb"status=0")
        assert is_alive(job.process.pid)


def test_the_end_of_the_run_is_shown_and_the_status_is_0(tmp_path):
    with working(tmp_path, "fails") as job, shell_of(job) as terminal:
        terminal.type(TYPED, rb"step.*\b7\b")
        (tmp_path / "go").touch()
        terminal.expect(rb"\x1b\[\?1049l")
        terminal.expect(rb"run .*failed: ")
        terminal.expect(rb"decision.*stop")
        terminal.expect(rb"ended=0")
        assert job.end() == 1


def test_a_terminal_may_shrink_and_go_away(tmp_path):
    with working(tmp_path) as job, shell_of(job) as terminal:
        terminal.type(TYPED, rb"step.*\b7\b")
        terminal.resize(12, 40)
        until(lambda: widest(terminal) == 40, "a frame that fits")
        (watcher,) = job.processes("--interval=0.2")
        terminal.close()
        until(lambda: not is_alive(watcher), "the watcher has ended")
        assert is_alive(job.process.pid)


@pytest.mark.parametrize("output", ["a pipe", "a file"])
def test_on_a_pipe_there_is_a_line_for_each_change_until_the_end(tmp_path, output):
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((tmp_path / "log").open("wb"))
        streams = {"stdout": file} if output == "a file" else {}
        job = stack.enter_context(working(tmp_path, **streams))
        watch = [*WATCH, "--json", job.journal.name[:-1]]
        seen = stack.enter_context(
            subprocess.Popen(watch, env=job.environ, stdout=subprocess.PIPE, text=True)
        )
        found = [json.loads(seen.stdout.readline())]
        while not found[-1]["jobs"] or found[-1]["jobs"][0]["step"] != 7:
            found.append(json.loads(seen.stdout.readline()))
        assert found[-1]["jobs"][0]["line"].startswith("step 7 ")
        assert found[-1]["jobs"][0]["left"] == 2
        (tmp_path / "go").touch()
        *_, last = map(json.loads, seen.stdout.read().splitlines())
        assert (seen.wait(), last["run"]["outcome"], last["run"]["status"]) == (0, "ok", 0)
        assert job.end() == 0


def test_without_a_run_that_goes_on_it_says_so_and_of_several_it_names_the_others(tmp_path):
    def ask(job: Run) -> subprocess.CompletedProcess[str]:
        return subprocess.run(WATCH, env=job.environ, capture_output=True, text=True, check=False)

    def started(job: Run) -> int:
        files = job.home.glob(".local/state/saferun/runs/*/events.jsonl")
        return sum('"event": "started"' in file.read_text(encoding="utf-8") for file in files)

    words = [*PYTHON, "-c", JOB, str(tmp_path / "go"), "8"]
    with working(tmp_path) as first, run(tmp_path, *words) as second:
        until(lambda: started(first) == 2, "both have started")
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(WATCH, env=second.environ, **streams) as watcher:
            assert "2 runs are going on; the others: " in watcher.stderr.readline()
            (tmp_path / "go").touch()
        assert watcher.returncode == 0
        assert (first.end(), second.end()) == (0, 0)
        none = ask(first)
    assert (none.returncode, none.stdout) == (2, "")
    assert "no run is going on" in none.stderr


def test_colour_is_for_terminals(tmp_path):
    job = ran(tmp_path, *PYTHON, "-c", "print(1)")
    for words in (["list"], ["show", "last"]):
        command = [sys.executable, "-m", "saferun", "runs", *words]
        piped = subprocess.run(command, env=job.environ, capture_output=True, check=True).stdout
        assert b"\x1b" not in piped
        coloured = in_pty(command, {**job.environ, "TERM": "xterm"})
        assert b"\x1b[" in coloured
        assert re.sub(rb"\x1b\[[\d;]*m", b"", coloured).replace(b"\r", b"").split() == (
            piped.split()
        )
    for quiet in ({"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}):
        assert b"\x1b" not in in_pty(command, {**job.environ, **quiet})


def widest(terminal: Terminal) -> int:
    """Return the length of the longest line of the next frame."""
    frame = terminal.expect(rb"(?s)\x1b\[H(.*?)(?=\x1b\[H)")[1]
    plain = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", frame).decode()
    return max(len(line.rstrip()) for line in plain.splitlines())


def in_pty(command: list[str], environ: dict[str, str]) -> bytes:
    """Return what a command writes to a terminal of 200 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 200, 0, 0))
    subprocess.run(command, env=environ, stdout=theirs, check=True)
    os.close(theirs)
    found = b""
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            found += piece
    os.close(ours)
    return found
