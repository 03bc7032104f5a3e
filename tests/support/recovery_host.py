"""Where a recovery is tried, and who holds a GPU there."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from fake_nvml import Nvml
from fakecuda import MINOR, Smi, driver_files, uuid

from saferun.base import proc
from saferun.gpu import recovery
from saferun.gpu.cuda_errors import RESET
from saferun.model import Gpu
from saferun.system import procfs

A = uuid(0)
GPU = Gpu(0, A, "NVIDIA Fake")


class RecoveryHost:
    """Where a recovery is tried: our own devices, a root that is none, no waiting."""

    def __init__(self, dev: Path) -> None:
        self.smi, self.nvml, self.dev = Smi(dev.parent / "bin"), Nvml(dev.parent / "nvml"), dev
        self.runs = dev.parent / "runs"
        driver = str(driver_files(dev.parent / "driver"))
        self.world = recovery.Reach(True, True, str(dev), driver, sleep=lambda s: None)
        self.environ = {
            "PATH": f"{self.smi.folder}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": str(self.nvml.folder),
            "TMPDIR": str(dev.parent),
        }

    def recover(self, *asks, **options):
        options = {"gpus": (GPU,), "world": self.world, "drain_s": 0.3, **options}
        return recovery.recover(asks=asks, environ=self.environ, runs=str(self.runs), **options)

    def reset(self, *, gpus=(GPU,), world=None, **terms):
        idle = {"policy": "when-idle", "alone": lambda: True, "suspects": [gpus[0].uuid]}
        terms = recovery.ResetTerms(**{**idle, **terms})
        return self.recover(RESET, gpus=gpus, terms=terms, world=world or self.world)

    @property
    def was_reset(self) -> bool:
        return any("reset" in argv for argv in self.smi.asked)


@contextlib.contextmanager
def holder(dev: Path, **environ: str):
    """A process that has the device node open, as one that computes on the GPU has."""
    node = str(dev / f"nvidia{MINOR}")  # O_PATH: there is no driver to open it otherwise
    code = f"import os, signal; os.open({node!r}, os.O_PATH); print(flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=environ, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def ended_owner() -> dict:
    """A saferun that has ended, as its run's journal names it."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as owner:
        start = proc.start(owner.pid)
        owner.communicate(b"\n")
    return {**procfs.this_process(), "pid": owner.pid, "start": start}


def left_by(
    runs: Path, by: dict | None = None, *, alive: int | None = None, run: str = "r1"
) -> dict[str, str]:
    """The environment of what a run started, and the run's journal, which says who ran it.

    `by` is its saferun; None: one that has ended. `alive` is when the run last lived; None: after
    all that these tests start.
    """
    by = by or ended_owner()
    folder = runs / run
    folder.mkdir(parents=True)
    event = {"at": 1, "event": "attempt", "attempt": 1, "by": by}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    last = procfs.now() + 1000 if alive is None else alive
    (folder / "alive").write_text(f"{last:020d}\n", encoding="utf-8")
    locks = f"{by['pid']}:{by['start']}:{A}"
    return {"SAFERUN_INJECT": contract(run), "SAFERUN_LOCKS": locks}


def contract(run: str, **more) -> str:
    known = {"v": 1, "run": run, "attempt": 1, "hooks": {}, "mitigations": []}
    return json.dumps({**known, **more})
