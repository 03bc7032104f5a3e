"""Strikes runs of two and three hosts at random, brings hosts back, and compares the weights.

    python tools/node_trials.py --first 0 --count 100 --jobs 3 [--kept DIR] [--summary FILE]

The hosts are network namespaces on this machine, with two ranks each under a real torchrun; ranks,
agents, keepers, saferuns, whole hosts and links are struck, and hosts come back after 1 to 90 s
(tests/lab/node_faults.py). A trial is right where every host ends by 0 with the weights of an
undisturbed run, or all end with the same true reason, and nothing is left. Linux, root, iproute2,
torch. `--first N --count 1` repeats trial N. Exit status 1 where a trial was not right.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("lab", "support")]
import node_faults  # noqa: E402
from fault_trials import Result, keep, run_all  # noqa: E402
from node_faults import FAULTS, REASON, RIGHT  # noqa: E402
from rights import missing  # noqa: E402

OUTCOMES = (*FAULTS, REASON, RIGHT)
LIMIT_S = 600.0  # a trial that takes longer hangs
CALM = (-2, -1)  # trials without a strike, one over the store and one over gloo


class Task(NamedTuple):
    """One trial to be made."""

    number: int
    place: str  # where its directory is made
    kept: str  # where the directory of a miss is copied to


def main() -> int:
    """Make the trials; return 1 where one was not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--kept", default="", help="a directory for the directories of misses")
    parser.add_argument("--summary", default="", help="a file for the results, as JSON")
    parser.add_argument("--list", action="store_true", help="say what they would be, and end")
    options = parser.parse_args()
    calm = CALM if options.count > 1 else ()
    numbers = [*calm, *range(options.first, options.first + options.count)]
    if options.list:
        print("\n".join(f"{number}: {node_faults.drawn(number)}" for number in numbers))
        return 0
    if problem := missing("make networks"):
        print(problem, file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nodes-") as place:
        tasks = [Task(number, place, options.kept) for number in numbers]
        results = run_all(one, tasks, options.jobs)
    print(table(results))
    print(f"{sum(strikes(r) for r in results)} strikes in {time.monotonic() - began:.0f} s")
    if options.summary:
        rows = [result._asdict() for result in results]
        Path(options.summary).write_text(json.dumps(rows, indent=1))
    return int(any(result.outcome in FAULTS for result in results))


def one(task: Task) -> Result:
    """Make one trial."""
    folder = Path(tempfile.mkdtemp(prefix=f"{task.number}-", dir=task.place))
    trial, began = node_faults.Trial(task.number, folder, LIMIT_S), time.monotonic()
    try:
        found = trial.go()
        outcome = min((outcome for outcome, _ in found), key=OUTCOMES.index, default=RIGHT)
        trouble = "\n".join(f"    {outcome}: {text}" for outcome, text in found)
    except Exception:
        outcome, trouble = OUTCOMES[0], traceback.format_exc()
    trouble += "".join(f"\n    {line}" for line in trial.log) if trouble else ""
    directory = keep(folder, task.kept, task.number) if trouble else ""
    shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    whom = ", ".join(strike.what for strike in trial.plan.strikes) or "nothing"
    way = trial.plan.way
    return Result(task.number, outcome, str(trial.plan), whom, way, seconds, trouble, directory)


def strikes(result: Result) -> int:
    """Return how many strikes a trial had."""
    return 0 if result.whom == "nothing" else len(result.whom.split(", "))


def table(results: list[Result]) -> str:
    """Return what came of the trials, by what struck and by what was run."""
    rows: dict[str, collections.Counter[str]] = {}
    for result in results:
        for name in (*result.whom.split(", "), result.way, "all trials"):
            rows.setdefault(name, collections.Counter())[result.outcome] += 1
    heads = [name for name in reversed(OUTCOMES) if rows["all trials"][name]]
    lines = [["", "trials", *heads], ["---"] * (len(heads) + 2)]
    for name in sorted(rows, key=lambda name: (name == "all trials", " " in name, name)):
        lines.append([name, *map(str, (rows[name].total(), *(rows[name][head] for head in heads)))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
