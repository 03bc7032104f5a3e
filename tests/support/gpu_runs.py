"""Whole runs on a machine with fake GPUs: libcuda, NVML, nvidia-smi."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fake_nvml import Nvml, gpu
from fakecuda import Smi
from runs import Run, run


class Machine:
    """A machine with fake GPUs, and saferun on it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.smi, self.nvml = Smi(folder / "bin"), Nvml(folder / "nvml")
        self.nvml.reports(gpu(0), gpu(1))
        self.home = folder / "home"
        self.home.mkdir()
        self.runs = self.home / ".local" / "state" / "saferun" / "runs"
        self.environ = {
            "PATH": f"{self.smi.folder}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "LD_LIBRARY_PATH": f"{self.nvml.folder}:{library}",
            "TMPDIR": str(folder),
            "SAFERUN_SET": "locks.gpus=off",  # tests run beside each other with the same UUIDs
        }

    def start(self, *argv: str, **behaviour: str) -> contextlib.AbstractContextManager[Run]:
        return run(self.folder, *argv, env={**self.environ, **behaviour})

    def run(self, *argv: str, **behaviour: str) -> Ran:
        with self.start(*argv, **behaviour) as job:
            status = job.end()
        messages = [line.removeprefix("saferun: ") for line in job.messages()]
        return Ran(status, job.out, job.err, messages, self._events)

    def _events(self, name: str) -> list[dict]:
        """Return the events of the only run; tests put other journals beside it."""
        (path,) = self.runs.glob("*-*-*/events.jsonl")
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [event for event in events if event["event"] == name]


class Ran(NamedTuple):
    """A saferun that has ended."""

    status: int
    out: str
    err: str
    messages: list[str]
    events: Callable[[str], list[dict]]
