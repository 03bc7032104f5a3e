"""Whole runs with one random fault each, live and as a bash script: what is promised must hold.

The number of a run decides everything about it, so that a miss can be repeated.
tools/fault_trials.py runs many; torch_faults.py has the same with a real torchrun.
"""

import contextlib
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from disks import small_disk
from helpers import living, until
from runs import Run, program, run, small_torchrun
from sandbox import nvidia_smi, text_of, write

DEADLY = ("KILL", "SEGV", "ABRT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "BUS")
RETURNS, SURVIVED, ENDS, ASKED, USER = "returns", "survived", "ends", "asked", "user's"
LOCKS = (Path("/run/lock/saferun"), Path("/tmp/saferun-lock"))


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
        limit_s: a run that takes longer hangs.
    """

    causes: tuple[str, ...] = ("process_tree_job.py", "small_torchrun", "bin/torchrun")

    def __init__(self, number: int, folder: Path, limit_s: float = 300) -> None:
        self.chance = chance = random.Random(number)
        self.number, self.folder = number, folder
        self._end = time.monotonic() + limit_s
        self.fault = chance.choice(self.faults())
        self.as_script = chance.random() < 0.1  # it is the same process: for parity
        # A job that is to be ended must not end by itself before the signal has passed through.
        self.steps = 3000 if self.fault.promise in (ENDS, ASKED) else 150
        self.strike_at = chance.randrange(1, 55)
        self.rank = chance.randrange(2)
        self.uuid = f"GPU-{number:08x}-{os.getpid():08x}-random-fault"

    def __str__(self) -> str:
        way = "script" if self.as_script else "live"
        where = f"rank {self.rank}, step {self.strike_at}"
        return f"{self.fault.whom} {self.fault.what} ({self.fault.promise}), {way}, {where}"

    def faults(self) -> list[Fault]:
        """Return all faults; those of processes are as frequent as their signals are many."""
        return faults()

    def left(self) -> float:
        """Return the seconds that are left of limit_s."""
        return max(1.0, self._end - time.monotonic())

    def go(self) -> None:
        """Run it; raise where a promise was not kept. The folder then has what the run wrote."""
        readers: list[Reader] = []
        try:
            with self._world():
                self._run(readers)
            self.check_locks()
        finally:
            for reader, name in zip(readers, ("stdout", "stderr"), strict=False):
                reader.join(10)
                (self.folder / name).write_bytes(reader.data)

    def _run(self, readers: list[Reader]) -> None:
        options = {"env": self.environ(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if self.as_script:
            options["command"] = ["bash", str(self._script())]
        with run(self.folder, *([] if self.as_script else self.argv()), **options) as job:
            readers += [Reader(job.process.stdout), Reader(job.process.stderr)]
            try:
                self._strike(job)
                status = job.process.wait(self.left())
                self._check_processes(job, status)
            except BaseException:
                self.note(job)
                raise
            for reader in readers:
                reader.join()
            self.check(job, status, readers)

    def note(self, job: Run) -> None:
        """Write down which processes of a run live that hangs or should be over."""
        lines = []
        for pid, name in living(job.mark).items():
            with contextlib.suppress(OSError):
                files = ("wchan", "status", "cmdline")
                wchan, status, cmdline = (text_of(Path(f"/proc/{pid}/{f}")) for f in files)
                state = " ".join(status.split("\n")[n].replace("\t", " ") for n in (2, 6))
                lines.append(f"{pid} {name} {state} {wchan}: {cmdline[:200]!r}")
        write(self.folder / "living", "\n".join(lines))

    # --- the run ---------------------------------------------------------------------------

    def environ(self) -> dict[str, str]:
        """Return the variables of the machine."""
        environ = small_torchrun(self.folder)
        self._fake_gpu()
        return {**environ, "SMALL_TORCHRUN_REPORTS": "1", "TMPDIR": str(self.folder / "tmp")}

    def _fake_gpu(self) -> None:
        """Give the machine a GPU that no other run knows."""
        answer = f"echo 'GPU 0: NVIDIA Fake (UUID: {self.uuid})'"
        nvidia_smi(self.folder / "bin", answer)

    def settings(self) -> list[str]:
        """Return saferun's own options."""
        return ["--profile=cuda", "--set=locks.gpus=refuse", "--set=retry.backoff_s=[0,0.1]"]

    def job(self) -> list[str]:
        """Return the words of torchrun."""
        mistake = [str(self.strike_at)] if self.fault.promise == USER else []
        words = [program("process_tree_job"), str(self.folder), str(self.steps), *mistake]
        return ["--nproc-per-node=2", *words]

    def argv(self) -> list[str]:
        """Return the words after `saferun`."""
        return [*self.settings(), *self.job()]

    def _script(self) -> Path:
        path = self.folder / "run.sh"
        make = [sys.executable, "-m", "saferun", "gen-shell", *self.settings(), "-o", str(path)]
        subprocess.run([*make, "--", *self.job()], check=True, capture_output=True)
        return path

    @contextlib.contextmanager
    def _world(self) -> Iterator[None]:
        (self.folder / "tmp").mkdir()
        if self.fault.whom != "disk":
            yield
            return
        with small_disk(self.folder / "home", "24k"):
            yield

    # --- the fault -------------------------------------------------------------------------

    def _strike(self, job: Run) -> None:
        if self.fault.whom in ("disk", "script"):
            return
        what = f"step {self.strike_at} of rank {self.rank}"
        until(lambda: self.reached(job) or self.over(job), what, self.left())
        self.strike(job)

    def strike(self, job: Run) -> None:
        """Do what the fault says, now."""
        fault = self.fault
        if fault.whom == "reader":
            job.process.stdout.close()
        elif fault.whom == "journal":
            subprocess.run(["rm", "-rf", job.home / ".local"], check=True)
        else:
            pid = self.target(job)
            first = "STOP" if fault.what == "PAUSE" else fault.what
            os.kill(pid, getattr(signal, f"SIG{first}"))
            if fault.what == "PAUSE":
                threading.Timer(0.5, _go_on, [pid]).start()

    def reached(self, job: Run) -> bool:
        """Return whether it is time."""
        return self.written(1, self.rank) >= self.strike_at

    def over(self, job: Run) -> bool:
        """Return whether the run has ended."""
        return job.process.poll() is not None

    def written(self, attempt: int, rank: int) -> int:
        """Return how many lines a rank has written to each stream in an attempt."""
        with contextlib.suppress(FileNotFoundError):
            content = (self.folder / f"count-{attempt}-{rank}").read_bytes()
            return int.from_bytes(content, "little")
        return 0

    def target(self, job: Run) -> int:
        """Return the pid of whom the fault strikes."""
        if self.fault.whom == "main":
            return job.process.pid
        if self.fault.whom in ("keeper", "launcher"):
            return int(until(lambda: job.events("started"), "its start")[0][self.fault.whom])
        rank = 0 if self.fault.whom == "helper" else self.rank
        found = lambda: self.pids(1, rank).get(self.fault.whom)  # noqa: E731 - until's condition
        return int(until(found, self.fault.whom, self.left())[0])

    def pids(self, attempt: int, rank: int) -> dict[str, list[int]]:
        """Return what a rank has written down of its processes, by their roles."""
        found: dict[str, list[int]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in text_of(self.folder / f"pids-{attempt}-{rank}").splitlines():
                role, _, pid = line.partition(" ")
                found.setdefault(role, []).append(int(pid))
        return found

    def attempts(self) -> int:
        """Return the number of the last attempt whose ranks came to their script."""
        names = [path.name.split("-") for path in self.folder.glob("pids-*-?")]
        return max((int(attempt) for _, attempt, _ in names), default=0)

    # --- the promises ----------------------------------------------------------------------

    def _check_processes(self, job: Run, status: int) -> None:
        """Only a helper that a job left on purpose may live, and only after a success."""
        allowed: set[int] = set()
        for attempt in range(1, self.attempts() + 1) if status == 0 else ():
            allowed |= set(self.pids(attempt, 0).get("helper", []))
        until(lambda: set(living(job.mark)) <= allowed, lambda: living(job.mark), 60)

    def expected(self) -> dict[str, tuple[set[int], bool]]:
        """Return the statuses that each promise allows, and whether the attempts are right."""
        attempts, failed = self.attempts(), set(range(-64, 256)) - {0}
        return {
            RETURNS: ({0}, attempts == 1),
            # Without its keeper a job may come to its end before it is ended.
            SURVIVED: ({0}, attempts == 2 or self.fault.whom == "keeper"),
            ENDS: (failed, attempts <= 1),
            ASKED: (failed, attempts <= 1),
            USER: ({1}, attempts == 1),
        }

    def check(self, job: Run, status: int, readers: list[Reader]) -> None:
        """Raise AssertionError where the end or the output is not what was promised."""
        job.err = readers[1].data.decode("utf-8", "replace")
        statuses, right = self.expected()[self.fault.promise]
        messages = "\n".join(line for line in job.err.splitlines() if not line.startswith("err "))
        text = f"status {status}, {self.attempts()} attempts\n{messages}"
        assert status in statuses, text
        assert right, text
        assert not self.own_tracebacks(job.err), text
        if self.fault.whom == "journal":
            assert not (job.home / ".local").exists(), "a half of the journal came back"
        for reader, name in zip(readers, ("out", "err"), strict=True):
            if self.fault.whom == "reader" and name == "out":
                continue
            self._check_lines(reader.data.decode("utf-8", "replace"), name)

    def _check_lines(self, text: str, name: str) -> None:
        """Each line that was written has come, once and in order."""
        # The place of an exception is told with the line after it, which may be another rank's.
        text = re.sub(r"^saferun: .*", "", text, flags=re.MULTILINE)
        for path in self.folder.glob("count-*"):
            _, attempt, rank = path.name.split("-")
            head = f"{name} {attempt} {rank} "
            # What another process wrote last may have no end of line.
            found = [int(number) for number in re.findall(rf"{head}(\d+)$", text, re.MULTILINE)]
            assert found == list(range(1, len(found) + 1)), f"{head}{found}"
            written = self.written(int(attempt), int(rank))
            assert len(found) >= written, f"{head}: {len(found)} of {written} lines"

    def check_locks(self) -> None:
        """Raise BlockingIOError where a lock of the run's GPU is still held."""
        free_locks(f"{self.uuid}*")

    def own_tracebacks(self, text: str) -> str:
        """Return the tracebacks on stderr that are not the job's own."""
        parts = text.split("Traceback (most recent call last):")[1:]
        # Two ranks that write at once may print their first lines one after the other.
        parts = [part for part in parts if 'File "' in part]
        return "".join(part for part in parts if not any(cause in part for cause in self.causes))


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def free_locks(pattern: str) -> None:
    """Remove lock files; raise BlockingIOError where one is held."""
    for path in (path for place in LOCKS for path in place.glob(pattern)):
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def try_one(trial: Trial) -> str:
    """Run a trial; return "" or what was not kept."""
    try:
        trial.go()
    except Exception:
        return f"{trial.number}: {trial}\n{traceback.format_exc()}"
    return ""
