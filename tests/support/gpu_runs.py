"""Whole runs on a machine with fake GPUs: libcuda, NVML, nvidia-smi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fake_nvml import Nvml, gpu
from fakecuda import Smi
from runs import Run, run
from sandbox import Sandbox, no_driver


class Machine(Sandbox):
    """A machine with fake GPUs, and saferun on it."""

    def __init__(self, folder: Path, *library: Path, **environ: str) -> None:
        no_driver()
        self.smi, self.nvml = Smi(folder / "bin"), Nvml(folder / "nvml")
        self.nvml.reports(gpu(0), gpu(1))
        libraries = ":".join(map(str, (self.nvml.folder, *library)))
        # Tests run beside each other with the same UUIDs.
        own = {"TMPDIR": str(folder), "SAFERUN_SET": "locks.gpus=off", **environ}
        super().__init__(folder, LD_LIBRARY_PATH=libraries, **own)

    def start(self, *argv: str, **behaviour: str) -> Run:
        return run(self.folder, *argv, env={**self.environ, **behaviour})

    def run(self, *argv: str, **behaviour: str) -> Ran:
        with self.start(*argv, **behaviour) as job:
            status = job.end()
        messages = [line.removeprefix("saferun: ") for line in job.messages()]
        return Ran(status, job.out, job.err, messages, self.events)


class Ran(NamedTuple):
    """A saferun that has ended."""

    status: int
    out: str
    err: str
    messages: list[str]
    events: Callable[[str], list[dict]]
