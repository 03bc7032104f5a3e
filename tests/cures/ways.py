"""Run a row of the cure table: under torchrun, under torchrun with restarts, under saferun."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from runs import Run, run
from table import HERE, Case, torchrun

LIMIT_S = 170
WAYS = ("torchrun", "torchrun --max-restarts=3", "saferun")


class Outcome(NamedTuple):
    """What came of one run."""

    finished: bool
    status: int | None  # None where it was still running when the time was over
    seconds: float
    attempts: int | None  # None where nothing tells
    kinds: tuple[str, ...]  # of each attempt that failed
    cures: tuple[str, ...]  # that were added, in order
    out: str
    err: str


def ended_within(job: Run, limit_s: float) -> int | None:
    """Return the exit status, or None after the time."""
    try:
        return job.end(limit_s)
    except subprocess.TimeoutExpired:
        return None


def go(case: Case, way: str, folder: Path) -> Outcome:
    """Run a row's program in a fresh directory; nothing of it lives afterwards.

    Args:
        case: the row.
        way: one of `WAYS`.
        folder: empty.
    """
    with case.around(folder) as setup:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        words = [f"--nproc-per-node={case.ranks}", *setup.options]
        words += [str(HERE / case.program), *setup.args]
        options = {"env": {**caches, **setup.env}, "preexec_fn": setup.preexec}
        if way == "saferun":
            words.insert(0, "--profile=cpu")
        else:
            options["command"] = [torchrun(), *way.split()[1:]]
        began = time.monotonic()
        with run(folder, *words, **options) as job:
            status = ended_within(job, LIMIT_S)
            seconds = time.monotonic() - began
            done = job.out.count(case.shows) == case.ranks
            ended = job.events("ended") if way == "saferun" else []
    return Outcome(
        finished=status == 0 and done,
        status=status,
        seconds=seconds,
        attempts=len(ended) or None,
        kinds=tuple(e["kind"] for e in ended if e["status"]),
        cures=tuple(e["add"] for e in ended if e["add"]),
        out=job.out,
        err=job.err,
    )
