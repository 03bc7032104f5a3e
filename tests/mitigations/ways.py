"""Run a row of the mitigation table: without its fault, and with it in three ways."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from helpers import free_port, living
from runs import Run, run
from sandbox import unquoted
from surroundings import HERE, torchrun
from table import Case

LIMIT_S = 170.0
HEALTHY, SUPERVISED = "without the fault", "saferun"
WAYS = (HEALTHY, "torchrun", "torchrun --max-restarts=3", SUPERVISED)
_OURS = (
    "SAFERUN",
    "PET_",
    "XDG_",
    "TORCHELASTIC",
    "HOME",
    "PATH",
)  # journal/reader.py says what these are


class Outcome(NamedTuple):
    """What came of one run."""

    finished: bool
    status: int | None  # None where it was still running when the time was over
    seconds: float
    attempts: int | None  # None where nothing tells
    kinds: tuple[str, ...]  # of each attempt that failed
    mitigations: tuple[str, ...]  # that were added, in order
    out: str
    err: str


def missing(case: Case) -> str:
    """Return what this machine lacks for a row, "" where it has all."""
    if case.gpus > gpus():
        return f"it needs {case.gpus} GPU{'s' * (case.gpus > 1)}"
    return case.needs.__doc__ or "" if case.needs and not case.needs() else ""


@functools.cache
def gpus() -> int:
    """Return how many GPUs nvidia-smi lists; 0 without it."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return done.stdout.count(b"UUID: GPU-")


def ended_within(job: Run, limit_s: float) -> int | None:
    """Return the exit status, or None after the time, when all of the job has been ended."""
    try:
        return job.end(limit_s)
    except subprocess.TimeoutExpired:
        for pid in living(job.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.end(5)
        return None


Launcher = Callable[[list[str]], list[str]]  # makes a command of torchrun's arguments


def go(
    case: Case, way: str, folder: Path, limit_s: float = LIMIT_S, launcher: Launcher | None = None
) -> Outcome:
    """Run a row's program in a fresh directory; nothing of it lives afterwards.

    Args:
        case: the row.
        way: one of `WAYS`, or another name where `launcher` is given.
        folder: empty.
        limit_s: for the run alone, without what is set up before it.
        launcher: None: what `way` says.
    """
    with (case.healthy if way == HEALTHY else case.around)(folder) as setup:
        port = [f"--master-port={free_port()}"] if case.gpus else []  # rows run side by side
        argv = [f"--nproc-per-node={case.ranks}", *port, *setup.options]
        argv += [str(HERE / case.program), *setup.args]
        env = {**variables(case, way, folder), **setup.env}
        options = {"env": env, "preexec_fn": setup.preexec}
        if launcher is not None:
            options["command"], argv = launcher(argv), []
        elif way == SUPERVISED:
            argv = argv if case.gpus else ["--profile=cpu", *argv]
        else:
            options["command"] = [torchrun(), *way.split()[1:]] if way != HEALTHY else [torchrun()]
        began = time.monotonic()
        with run(folder, *argv, **options) as job:
            status = ended_within(job, limit_s)
            seconds = time.monotonic() - began
            done = job.out.count(case.shows) == case.ranks
            ended = job.events("ended") if way == SUPERVISED else []
    return Outcome(
        finished=status == 0 and done,
        status=status,
        seconds=seconds,
        attempts=len(ended) or None,
        kinds=tuple(e["kind"] for e in ended if e["status"]),
        mitigations=tuple(e["add"] for e in ended if e["add"]),
        out=job.out,
        err=job.err,
    )


def variables(case: Case, way: str, folder: Path) -> dict[str, str]:
    """Return what a run finds beside what every run finds: an empty compile cache of its own.

    What a GPU's machine sets for its driver and its libraries stays, on a CPU nothing does.
    """
    kept, few = {}, {}
    if case.gpus:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(_OURS)}
        few = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # rows run side by side
    healthy = {"WITHOUT_FAULT": "1"} if way == HEALTHY else {}
    return {**kept, **few, **healthy, "TORCHINDUCTOR_CACHE_DIR": unquoted(folder / "inductor")}
