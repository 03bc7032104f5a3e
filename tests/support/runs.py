"""Whole runs: saferun as people start it, with the real torchrun and the example script."""

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

from helpers import DEADLINE_S, MARK, ROOT, living, until

EXAMPLE = ROOT / "examples" / "train_gpt.py"
FAULTY = Path(__file__).with_name("faulty.py")
SMALL = ["--layers=1", "--width=32", "--heads=2", "--block=32", "--batch=2", "--eval-every=1000"]
LIMIT_S = 120


class Run:
    """One saferun and everything that it started."""

    def __init__(self, folder: Path, words: list[str], **options: Any) -> None:
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
            [*command, *words],
            env=self.environ,
            cwd=options.pop("cwd", folder),
            **{**streams, **options},
        )
        self.out = self.err = ""

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; return the exit status."""
        out, err = self.process.communicate(timeout=limit_s)
        self.out, self.err = (s.decode("utf-8", "replace") if s else "" for s in (out, err))
        return self.process.returncode

    def said(self) -> list[str]:
        """Return the lines that saferun itself wrote."""
        return [line for line in self.err.splitlines() if line.startswith("saferun: ")]

    @property
    def journal(self) -> Path:
        """The run's directory."""
        (path,) = self.home.glob(".local/state/saferun/runs/*")
        return path

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the journal's events of a name, or all."""
        lines = (self.journal / "events.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [e for e in found if name in (None, e["event"])]

    def processes(self, word: str) -> list[int]:
        """Return the pids of the run's processes that have a word in their command line."""
        found = []
        for pid in living(self.mark):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.encode() in part for part in command):
                    found.append(pid)
        return sorted(found)

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the processes that torchrun started and that run the script."""
        found: dict[int, int] = {}
        for pid in living(self.mark):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [e[5:] for e in environ if e.startswith(b"RANK=")]
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
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
        for _ in range(100):
            found = living(self.mark)
            if not found:
                break
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


@contextlib.contextmanager
def run(folder: Path, *words: str, **options: Any) -> Iterator[Run]:
    """Start saferun with these words; whatever is left of it is ended afterwards."""
    one = Run(folder, list(words), **options)
    try:
        yield one
    finally:
        one.clean()


def training(
    folder: Path, fault: str = "", rank: int = 1, step: int = 12, **more: Any
) -> list[str]:
    """Return the words that train the example on two ranks, with a fault in it.

    Args:
        folder: checkpoints go below it.
        fault: see faulty.py; empty for none.
        rank: where it strikes.
        step: at which step of that process.
        more: `steps`, `attempts` in which it strikes, `options` for saferun before the script.
    """
    options = more.get("options", ())
    out = folder / "out"
    script = [str(EXAMPLE), *SMALL, f"--steps={more.get('steps', 20)}", f"--out={out}"]
    script += ["--resume", "--save-every=5", "--log-every=1"]
    if fault:
        attempts = more.get("attempts", "1")
        script = [str(FAULTY), fault, str(rank), str(step), attempts, *script]
    return [*options, "--profile=cpu", "--nproc-per-node=2", *script]
