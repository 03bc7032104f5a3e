"""Whole runs with one random fault each, live and as a bash script: what is promised must hold.

    PYTHONPATH=tests/support python tests/support/random_faults.py FIRST COUNT [FOLDER]

The number of a run decides everything about it, so that a miss can be repeated. Exit status 1 where
a promise was not kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from helpers import living, until
from runs import Run, executable, program, run, small_torchrun

DEADLY = ("KILL", "SEGV", "ABRT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "BUS")
RETURNS, SURVIVED, ENDS, ASKED, USER = "returns", "survived", "ends", "asked", "user's"


class Fault(NamedTuple):
    """What is done to whom, and what must become of the run."""

    whom: str  # "main", "keeper", "launcher", "rank", "data", "helper", or a part of the world
    what: str  # a signal's name; "PAUSE" is SIGSTOP and later SIGCONT
    promise: str


def faults() -> list[Fault]:
    """Return all faults; those of processes are as frequent as their signals are many."""
    return [
        *(Fault("main", name, ENDS) for name in ("KILL", "SEGV", "ABRT")),
        *(Fault("main", name, ASKED) for name in ("TERM", "INT", "HUP")),
        *(Fault("main", name, RETURNS) for name in ("PAUSE", "USR1", "USR2", "WINCH")),
        *(Fault("keeper", name, SURVIVED) for name in ("KILL", "STOP")),
        *(Fault("keeper", name, RETURNS) for name in ("PAUSE", "TERM", "USR1", "INT")),
        *(Fault("launcher", name, SURVIVED) for name in ("KILL", "SEGV", "ABRT", "TERM", "BUS")),
        *(Fault("launcher", name, RETURNS) for name in ("PAUSE", "USR1", "USR2")),
        *(Fault("rank", name, SURVIVED) for name in DEADLY),
        Fault("rank", "PAUSE", RETURNS),
        *(Fault("data", name, SURVIVED) for name in ("KILL", "SEGV", "ABRT", "TERM", "BUS")),
        Fault("data", "PAUSE", RETURNS),
        *(Fault("helper", name, RETURNS) for name in ("KILL", "STOP")),
        *(Fault("bundle", name, ENDS) for name in ("KILL", "SEGV")),
        Fault("reader", "closed", ENDS),
        Fault("disk", "full", RETURNS),
        Fault("journal", "gone", RETURNS),
        Fault("script", "mistake", USER),
    ]


class Reader(threading.Thread):
    """Reads a stream to its end, or until it is told to close it."""

    def __init__(self, file) -> None:
        super().__init__()
        self.data, self._file = bytearray(), file
        self.start()

    def run(self) -> None:
        """Read."""
        with contextlib.suppress(ValueError, OSError):
            while piece := os.read(self._file.fileno(), 1 << 16):
                self.data += piece


class Trial:
    """One run with its fault.

    Args:
        number: of the trial; it decides all else.
        folder: an empty one.
    """

    def __init__(self, number: int, folder: Path) -> None:
        chance = random.Random(number)
        self.folder = folder
        self.fault = chance.choice(faults())
        self.as_script = self.fault.whom == "bundle" or chance.random() < 0.4
        # A job that is to be ended must not end by itself before the signal has passed through.
        self.steps = 3000 if self.fault.promise in (ENDS, ASKED) else 150
        self.strike_at = chance.randrange(1, 55)
        self.rank = chance.randrange(2)
        self.uuid = f"GPU-{number:08x}-{os.getpid():08x}-random-fault"

    def __str__(self) -> str:
        way = "script" if self.as_script else "live"
        where = f"rank {self.rank}, step {self.strike_at}"
        return f"{self.fault.whom} {self.fault.what} ({self.fault.promise}), {way}, {where}"

    def go(self) -> None:
        """Run it; raise AssertionError where a promise was not kept."""
        with self._world() as extra:
            options = {"env": self._environ(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            if self.as_script:
                options["command"] = ["bash", str(self._script(extra))]
            with run(self.folder, *([] if self.as_script else self._argv(extra)), **options) as job:
                readers = [Reader(job.process.stdout), Reader(job.process.stderr)]
                self._strike(job, readers)
                status = job.process.wait(300)
                self._check_processes(job, status)
                for reader in readers:
                    reader.join()
                self._check(job, status, readers)
        self._check_locks()

    # --- the run ---------------------------------------------------------------------------

    def _environ(self) -> dict[str, str]:
        environ = small_torchrun(self.folder)
        answer = f"echo 'GPU 0: NVIDIA Fake (UUID: {self.uuid})'"
        executable(self.folder / "bin" / "nvidia-smi", f"#!/bin/sh\n{answer}\n")
        return {**environ, "SMALL_TORCHRUN_REPORTS": "1", "TMPDIR": str(self.folder / "tmp")}

    def _argv(self, extra: list[str]) -> list[str]:
        settings = ["--set=locks.gpus=refuse", "--set=retry.backoff_s=[0,0.1]"]
        mistake = [str(self.strike_at)] if self.fault.promise == USER else []
        job = [program("process_tree_job"), str(self.folder), str(self.steps), *mistake]
        return ["--profile=cuda", *settings, *extra, "--nproc-per-node=2", *job]

    def _script(self, extra: list[str]) -> Path:
        path, arguments = self.folder / "run.sh", self._argv([])
        own = [word for word in arguments if word.startswith(("--profile", "--set"))]
        make = [sys.executable, "-m", "saferun", "gen-shell", *own, "-o", str(path), "--"]
        subprocess.run([*make, *arguments[len(own) :]], check=True, capture_output=True)
        return path

    @contextlib.contextmanager
    def _world(self) -> Iterator[list[str]]:
        (self.folder / "tmp").mkdir()
        if self.fault.whom != "disk":
            yield []
            return
        place = self.folder / "home"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "none", place], check=True)
        try:
            yield []
        finally:
            subprocess.run(["umount", "-l", place], check=True)

    # --- the fault -------------------------------------------------------------------------

    def _strike(self, job: Run, readers: list[Reader]) -> None:
        fault = self.fault
        if fault.whom in ("disk", "script"):
            return
        until(lambda: self._written(1, self.rank) >= self.strike_at or self._over(job), "a step")
        if fault.whom == "reader":
            job.process.stdout.close()
        elif fault.whom == "journal":
            subprocess.run(["rm", "-rf", job.home / ".local"], check=True)
        else:
            pid = self._target(job)
            first = "STOP" if fault.what == "PAUSE" else fault.what
            os.kill(pid, getattr(signal, f"SIG{first}"))
            if fault.what == "PAUSE":
                threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()

    def _over(self, job: Run) -> bool:
        return job.process.poll() is not None

    def _written(self, attempt: int, rank: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            content = (self.folder / f"count-{attempt}-{rank}").read_bytes()
            return int.from_bytes(content, "little")
        return 0

    def _target(self, job: Run) -> int:
        if self.fault.whom == "main":
            return job.process.pid
        if self.fault.whom == "bundle":
            return int(job.events("attempt")[0]["by"]["pid"])
        if self.fault.whom in ("keeper", "launcher"):
            return int(until(lambda: job.events("started"), "its start")[0][self.fault.whom])
        rank = 0 if self.fault.whom == "helper" else self.rank
        lines = (
            until((self.folder / f"pids-1-{rank}").exists)
            and (self.folder / f"pids-1-{rank}").read_text().splitlines()
        )
        return next(int(line.split()[1]) for line in lines if line.startswith(self.fault.whom))

    # --- the promises ----------------------------------------------------------------------

    def _check_processes(self, job: Run, status: int) -> None:
        """Only a helper that a job left on purpose may live, and only after a success."""
        allowed: set[int] = set()
        if status == 0:
            for path in self.folder.glob("pids-*-0"):
                lines = path.read_text().splitlines()
                allowed |= {int(line.split()[1]) for line in lines if line.startswith("helper")}
        until(lambda: set(living(job.mark)) <= allowed, lambda: living(job.mark), 60)

    def _check(self, job: Run, status: int, readers: list[Reader]) -> None:
        job.err = readers[1].data.decode("utf-8", "replace")
        attempts = len({path.name.split("-")[1] for path in self.folder.glob("pids-*")})
        expected = {
            RETURNS: (status == 0, attempts == 1),
            # Without its keeper a job may come to its end before it is ended.
            SURVIVED: (status == 0, attempts == 2 or self.fault.whom == "keeper"),
            ENDS: (status != 0, attempts == 1),
            ASKED: (status != 0, attempts == 1),
            USER: (status == 1, attempts == 1),
        }[self.fault.promise]
        messages = "\n".join(line for line in job.err.splitlines() if not line.startswith("err "))
        assert all(expected), f"status {status}, {attempts} attempts\n{messages}"
        assert "Traceback" not in _own(job.err), job.err
        if self.fault.whom == "journal":
            assert not (job.home / ".local").exists(), "a half of the journal came back"
        for reader, name in zip(readers, ("out", "err"), strict=True):
            if self.fault.whom == "reader" and name == "out":
                continue
            self._check_lines(reader.data.decode("utf-8", "replace").splitlines(), name)

    def _check_lines(self, lines: list[str], name: str) -> None:
        """Each line that was written has come, once and in order."""
        for path in self.folder.glob("count-*"):
            _, attempt, rank = path.name.split("-")
            head = f"{name} {attempt} {rank} "
            found = [line for line in lines if line.startswith(head)]
            assert found == [f"{head}{step}" for step in range(1, len(found) + 1)], head
            written = self._written(int(attempt), int(rank))
            assert len(found) >= written, f"{head}: {len(found)} of {written} lines"

    def _check_locks(self) -> None:
        for place in (Path("/run/lock/saferun"), Path("/tmp/saferun-lock")):
            for path in place.glob(f"{self.uuid}*"):
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if one is held
                path.unlink()


def _own(text: str) -> str:
    """Return stderr without the tracebacks of the job's own exceptions."""
    causes = ("process_tree_job.py", "small_torchrun", "bin/torchrun")
    parts = text.split("Traceback (most recent call last):")
    ours = [part for part in parts[1:] if not any(cause in part for cause in causes)]
    return "".join(f"Traceback{part}" for part in ours)


def try_one(number: int, folder: Path) -> str:
    """Run one trial; return "" or what was not kept."""
    trial = Trial(number, folder)
    try:
        trial.go()
    except Exception:
        return f"{number}: {trial}\n{traceback.format_exc()}"
    return ""


def main(first: int, count: int, say: Callable[[str], object]) -> int:
    """Run trials one after the other; return how many promises were not kept."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `&` in a script had it ignored
    missed = 0
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            trouble = try_one(number, Path(folder))
        missed += bool(trouble)
        say(trouble or f"{number}: {Trial(number, Path(folder))}")
    say(f"{count} runs, {missed} misses")
    return missed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), lambda text: print(text, flush=True))))
