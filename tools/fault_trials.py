"""Runs saferun many times with one random fault each, and says which promises were not kept.

    python tools/fault_trials.py --first 0 --count 500
    python tools/fault_trials.py --torch --jobs 24 --seconds 500 --kept DIR --summary FILE

Without --torch each run has a small launcher (tests/lab/random_faults.py), with it a real
torchrun and two ranks with torch (torch_faults.py). A run's number decides its fault, so that a
miss can be repeated. Linux, and root for a full disk. Only saferun's own dependencies are needed,
and torch. Exit status 1 where a promise was not kept.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("lab", "support")]
LEAST_S = 60.0  # with less time left no further run begins
LIMIT_S = 240.0  # a run that takes longer hangs
SHOWN = 6000  # characters of a miss
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


class Task(NamedTuple):
    """One run to be made."""

    number: int
    torch: bool
    way: str  # "live", "script", or "" for what the number decides
    place: str  # where its directory is made
    kept: str  # where the directory of a miss is copied to
    end: float  # time.monotonic() by when it must be over


class Result(NamedTuple):
    """What came of it."""

    number: int
    outcome: str  # "kept", "missed", "unfinished" where the time was over, "not run"
    what: str  # the fault in words
    whom: str
    way: str
    seconds: float
    trouble: str = ""
    directory: str = ""


def main() -> int:
    """Make the runs; return 1 where a promise was not kept."""
    options = parsed()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `&` in a script had it ignored,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup this one
    path = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.realpath(entry) for entry in path)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TRIAL_RANKS"] = "warm" if options.warm else "spawn"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        os.environ.setdefault(INDUCTOR, str(Path(place, "inductor")))
        if options.torch:
            fill_caches(Path(place))
        end = began + options.seconds
        numbers = range(options.first, options.first + options.count)
        known = (options.torch, options.way, place, options.kept, end)
        results = run_all(one, [Task(number, *known) for number in numbers], options.jobs)
    summary = summed(results, time.monotonic() - began)
    print({name: summary[name] for name in ("outcomes", "seconds", "locks_held")})
    if options.summary:
        Path(options.summary).write_text(json.dumps(summary, indent=1))
    return int(bool(summary["missed"] or summary["locks_held"]))


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="all must be over by then")
    parser.add_argument("--torch", action="store_true", help="with a real torchrun")
    parser.add_argument("--warm", action="store_true", help="ranks are forked, with --torch")
    parser.add_argument("--way", choices=["live", "script"], default="", help="all of them so")
    parser.add_argument("--kept", default="", help="a directory for the directories of misses")
    parser.add_argument("--summary", default="", help="a file for the results, as JSON")
    return parser.parse_args()


def run_all(run: Callable[[Any], Result], tasks: list[Any], jobs: int) -> list[Result]:
    """Make the runs, some at once, and print each one's result when it comes."""
    results = []
    context = multiprocessing.get_context("spawn")  # no lock of another thread is inherited
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run, task) for task in tasks]):
            result = future.result()
            results.append(result)
            if result.outcome != "not run":
                print(f"{result.outcome} {result.number}: {result.what}, {result.seconds:.0f} s")
            if result.trouble:
                print(result.trouble[:SHOWN])
            sys.stdout.flush()
    return sorted(results)


def fill_caches(place: Path) -> None:
    """Compile once what all runs compile."""
    import torch_faults

    folder = place / "first"
    folder.mkdir()
    torch_faults.warm(folder)


def one(task: Task) -> Result:
    """Make one run."""
    import random_faults
    import torch_faults

    left = task.end - time.monotonic()
    if left < LEAST_S:
        return Result(task.number, "not run", "", "", "", 0.0)
    folder = Path(tempfile.mkdtemp(dir=task.place))
    kind = torch_faults.TorchTrial if task.torch else random_faults.Trial
    limit_s = min(LIMIT_S, left - 20)
    trial = kind(task.number, folder, limit_s)
    if task.way:
        trial.as_script = task.way == "script"
    began = time.monotonic()
    trouble = random_faults.try_one(trial)
    seconds = time.monotonic() - began
    over = seconds >= limit_s < LIMIT_S
    outcome = "kept" if not trouble else "unfinished" if over else "missed"
    directory = keep(folder, task.kept, task.number) if trouble else ""
    shutil.rmtree(folder, ignore_errors=True)
    way = "script" if trial.as_script else "live"
    fault = f"{trial.fault.whom} {trial.fault.what}"
    return Result(
        task.number, outcome, str(trial), fault, way, seconds, trouble[: 4 * SHOWN], directory
    )


def keep(folder: Path, place: str, number: int) -> str:
    """Copy what a run wrote, but for caches and checkpoints; return where it is."""
    if not place:
        return ""
    leave = shutil.ignore_patterns("inductor", "*.pt", "*.new", "pymp-*")
    to = Path(place, str(number))
    shutil.rmtree(to, ignore_errors=True)
    try:
        shutil.copytree(folder, to, symlinks=True, ignore=leave)
    except shutil.Error as error:  # a socket or a fifo
        (to / "not-copied").write_text(str(error))
    return str(to)


def summed(results: list[Result], seconds: float) -> dict[str, object]:
    """Return all that is to be known afterwards."""
    done = [result for result in results if result.outcome != "not run"]
    faults: dict[str, dict[str, int]] = {}
    for result in done:
        row = faults.setdefault(f"{result.whom} {result.way}", {})
        row[result.outcome] = row.get(result.outcome, 0) + 1
    return {
        "seconds": round(seconds),
        "outcomes": dict(collections.Counter(result.outcome for result in results)),
        "missed": [result._asdict() for result in done if result.outcome == "missed"],
        "unfinished": [result._asdict() for result in done if result.outcome == "unfinished"],
        "locks_held": locks_held(),
        "faults": dict(sorted(faults.items())),
        "runs": [[r.number, r.outcome, r.what, round(r.seconds)] for r in done],
    }


def locks_held() -> list[str]:
    """Return the lock files of GPUs that some process still holds, now that all runs are over."""
    import random_faults

    held = []
    paths = [path for place in random_faults.LOCKS for path in place.glob("*")]
    for path in (path for path in paths if path.suffix == ".lock" or ".slot" in path.name):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                held.append(str(path))
    return held


if __name__ == "__main__":
    sys.exit(main())
