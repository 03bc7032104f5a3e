"""Whole runs: saferun as people start it, as a process with all that it starts.

The job is the example script, or a counting one that needs no torch; the launcher is the real
torchrun, or a small one for what is not about torchrun. Both cost seconds of a core for each
process that imports torch: use the small ones unless torch or torchrun is what a test is about.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers import DEADLINE_S, MARK, ROOT, kill_all, living, until, watched
from repo import source
from sandbox import executable, own_lines, python_program

EXAMPLE = ROOT / "examples" / "train_gpt.py"
PROGRAMS = ROOT / "tests" / "programs" / "faults"
SMALL = ["--layers=1", "--width=32", "--heads=2", "--block=32", "--batch=2", "--eval-every=1000"]
AT_ONCE = "--set=retry.backoff_s=[0, 0]"
LIMIT_S = 300  # generous: a loaded machine is slow, and an event ends the wait


class Run:
    """One saferun and everything that it started."""

    def __init__(self, folder: Path, argv: list[str], **options: Any) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        extra = options.pop("env", {})
        venv = os.path.dirname(sys.executable)
        self.environ = {
            "PATH": f"{venv}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
            **{n: os.environ[n] for n in ("PYTHONPATH", "LD_LIBRARY_PATH") if n in os.environ},
            **extra,
        }
        command = options.pop("command", [sys.executable, "-m", "saferun"])
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        self.process = subprocess.Popen(
            [*command, *argv],
            env=self.environ,
            cwd=options.pop("cwd", folder),
            **{**streams, **options},
        )
        watched[self.process] = self.mark
        self.out = self.err = ""
        self._err_so_far = b""

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; return the exit status."""
        out, err = self.process.communicate(timeout=limit_s)
        err = self._err_so_far + (err or b"")
        self.out, self.err = (s.decode("utf-8", "replace") if s else "" for s in (out, err))
        return self.process.returncode

    def wait_for_message(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Wait until a text has come on stderr."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)

        def came() -> bool:
            self._err_so_far += self.process.stderr.read() or b""
            return text.encode() in self._err_so_far

        until(came, lambda: f"{text!r} is not in what it wrote: {self._err_so_far!r}", limit_s)
        os.set_blocking(self.process.stderr.fileno(), True)

    def messages(self) -> list[str]:
        """Return the lines that saferun itself wrote."""
        return own_lines(self.err)

    @property
    def journal(self) -> Path:
        """The run's directory."""
        (path,) = self.home.glob(".local/state/saferun/runs/*")
        return path

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the journal's events of a name, or all."""
        lines = (self.journal / "events.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return [e for e in found if name in (None, e["event"])]

    def wait_for_event(self, name: str) -> None:
        """Wait until the journal has an event of a name."""
        journals = ".local/state/saferun/runs/*/events.jsonl"
        until(lambda: list(self.home.glob(journals)) and self.events(name), name)

    def ask(self, *argv: str) -> str:
        """Return what `saferun ARGV` prints for the run's user."""
        command = [sys.executable, "-m", "saferun", *argv]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=True)
        return done.stdout

    def processes(self, part: str) -> list[int]:
        """Return the pids of the run's processes of whose words one ends so."""
        found = []
        for pid in living(self.mark):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(part.encode()) for word in command):
                    found.append(pid)
        return sorted(found)

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the processes that torchrun started and that run the script."""
        found: dict[int, int] = {}
        for pid in living(self.mark):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [e[5:] for e in environ if e.startswith(b"RANK=")]
                parent = (
                    Path(f"/proc/{pid}/stat")
                    .read_text(encoding="utf-8")
                    .rpartition(")")[2]
                    .split()[1]
                )
                above = Path(f"/proc/{parent}/environ").read_bytes()
                if ranks and b"\0RANK=" not in b"\0" + above:
                    found[int(ranks[0])] = pid
        return found

    def keeper(self) -> int:
        """Return the pid of the keeper."""
        names = living(self.mark).items()
        return next(pid for pid, name in names if name == "saferun-keeper")

    def nothing_lives(self, limit_s: float = DEADLINE_S) -> None:
        """Wait until no process of the run lives."""
        until(lambda: not living(self.mark), f"{living(self.mark)} still live", limit_s)

    def clean(self) -> None:
        """End whatever is left."""
        watched.pop(self.process, None)
        kill_all(self.mark)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


@contextlib.contextmanager
def run(folder: Path, *argv: str, **options: Any) -> Iterator[Run]:
    """Start saferun with these arguments; whatever is left of it is ended afterwards."""
    one = Run(folder, list(argv), **options)
    try:
        yield one
    finally:
        one.clean()


def program(name: str) -> str:
    """Return the path of one of the programs that these runs start."""
    return str(PROGRAMS / f"{name}.py")


def example(folder: Path, fault: str = "", rank: int = 1, step: int = 12) -> list[str]:
    """Return the arguments that train the example on two ranks for 20 steps, with a fault in it.

    Args:
        folder: checkpoints go below it.
        fault: see strike.py; it comes in the first attempt. Empty for none.
        rank: where it strikes.
        step: at which step of that process.
    """
    script = [str(EXAMPLE), *SMALL, "--steps=20", f"--out={folder / 'out'}"]
    script += ["--resume", "--save-every=5", "--log-every=1"]
    if fault:
        script = [program("example_with_fault"), fault, str(rank), str(step), "1", *script]
    return ["--profile=cpu", AT_ONCE, "--nproc-per-node=2", *script]


def counting(
    folder: Path, fault: str = "", rank: int = 1, step: int = 12, attempts: str = "1"
) -> list[str]:
    """Return the arguments that count to 20 on two ranks, without torch, with a fault in it.

    Args:
        folder: checkpoints go below it.
        fault: see strike.py; empty for none.
        rank: where it strikes, while the other ranks wait.
        step: at which step of that process.
        attempts: in which it strikes, as "1,2".
    """
    script = [program("counting_job"), str(folder / "out"), "20"]
    if fault:
        script += [fault, str(rank), str(step), attempts]
    return ["--profile=cpu", AT_ONCE, "--nproc-per-node=2", *script]


def staying(folder: Path) -> list[str]:
    """Return the arguments of two ranks that count to 2 and then stay until they are ended."""
    return counting(folder, "stay", rank=-1, step=3, attempts="any")


def small_torchrun(folder: Path) -> dict[str, str]:
    """Return variables of a machine whose torchrun is small_torchrun.py, which needs no torch."""
    place = folder / "bin"
    executable(place / "torchrun", python_program(source("faults/small_torchrun")))
    return {"PATH": f"{place}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
