"""Whole runs: saferun as people start it, as a process with all that it starts.

The job is the example script, or a counting one that needs no torch; the launcher is the real
torchrun, or a small one for what is not about torchrun. Both cost seconds of a core for each
process that imports torch: use the small ones unless torch or torchrun is what a test is about.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import ROOT, free_port, parent, until
from releases import torch_before
from repo import source
from sandbox import BESIDE, SAFERUN, Sandbox, executable, output, own_lines, python_program

EXAMPLE = ROOT / "examples" / "train_gpt.py"
PROGRAMS = ROOT / "tests" / "programs" / "faults"
SMALL = ["--layers=1", "--width=32", "--heads=2", "--block=32", "--batch=2", "--eval-every=1000"]
AT_ONCE = "--set=retry.backoff_s=[0, 0]"
PYTHON = ["--profile=cpu", "--set=launcher=python", AT_ONCE]
LIMIT_S = 300  # generous: a loaded machine is slow, and an event ends the wait


class Run(Sandbox):
    """One saferun, or another launcher, and everything that it started.

    Args:
        folder: of its home.
        argv: its words.
        env: more variables.
        command: what stands before the words.
        options: of Popen.
    """

    def __init__(
        self,
        folder: Path,
        argv: list[str],
        *,
        env: Mapping[str, str] | None = None,
        command: Sequence[object] = SAFERUN,
        **options: Any,
    ) -> None:
        # An older torchrun takes 29500, which another run of the tests may have.
        port = {"PET_MASTER_PORT": str(free_port())} if torch_before("2.9") else {}
        super().__init__(folder, **port, **(env or {}))
        self.process = self.popen(*command, *argv, **options)
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
        os.set_blocking(self.process.stderr.fileno(), False)

        def came() -> bool:
            self._err_so_far += self.process.stderr.read() or b""
            return text.encode() in self._err_so_far

        until(came, lambda: f"{text!r} is not in what it wrote: {self._err_so_far!r}", limit_s)
        os.set_blocking(self.process.stderr.fileno(), True)

    def messages(self) -> list[str]:
        """Return the lines that saferun itself wrote."""
        return own_lines(self.err)

    def wait_for_event(self, name: str) -> None:
        """Wait until the journal has an event of a name."""
        until(lambda: list(self.runs.glob("*/events.jsonl")) and self.events(name), name)

    def ask(self, *argv: str) -> str:
        """Return what `saferun ARGV` prints for the run's user."""
        return output(*SAFERUN, *argv, env=self.environ)

    def processes(self, part: str) -> list[int]:
        """Return the pids of the run's processes of whose words one ends so."""
        found = []
        for pid in self.living():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(part.encode()) for word in command):
                    found.append(pid)
        return sorted(found)

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the processes that torchrun started and that run the script."""
        found: dict[int, int] = {}
        for pid in self.living():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [e[5:] for e in environ if e.startswith(b"RANK=")]
                above = Path(f"/proc/{parent(pid)}/environ").read_bytes()
                if ranks and b"\0RANK=" not in b"\0" + above:
                    found[int(ranks[0])] = pid
        return found

    def keeper(self) -> int:
        """Return the pid of the keeper."""
        names = self.living().items()
        return next(pid for pid, name in names if name == "saferun-keeper")


def run(folder: Path, *argv: str, **options: Any) -> Run:
    """Start saferun with these arguments; whatever is left of it is ended afterwards."""
    return Run(folder, list(argv), **options)


def ran(folder: Path, *argv: str, status: int | None = 0, **options: Any) -> Run:
    """Run saferun to its end, after which nothing of it lives.

    Args:
        folder: of its home.
        argv: its words.
        status: with which it ends; None for any but 0.
        options: of `Run`.
    """
    with run(folder, *argv, **options) as job:
        ended = job.end()
        assert ended if status is None else ended == status, (ended, job.err)
        job.nothing_lives()
    return job


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
    return {"PATH": f"{place}:{BESIDE}:/usr/sbin:/usr/bin:/sbin:/bin"}
