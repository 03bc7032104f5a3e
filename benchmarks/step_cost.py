"""Does a training step take longer under saferun, and what do saferun's own processes use?

Runs of step_cost_job.py alternate between torchrun, saferun without a process beside the job
(`--retries 0`), supervised without the watch, and supervised as by default. A row is a way and a
program (bound by the GPU, or by the host): the median step of each run, the mean of their ratios to
torchrun's run of the same round with its 95 % confidence interval, by wall time and by CUDA events.
The second table has the CPU seconds of saferun's processes. Bound: 1.005.

    python benchmarks/step_cost.py [--rounds 12] [--seconds 10] [--save FILE] [--load FILE ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOB = ROOT / "benchmarks" / "step_cost_job.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SAFERUN = [sys.executable, "-m", "saferun"]
WAYS = {
    "torchrun": TORCHRUN,
    "--retries 0": [*SAFERUN, "--retries", "0"],
    "supervised, watch off": [*SAFERUN, "--set", "watch.mode=off"],
    "supervised": SAFERUN,
}
# The next attempt's agent imports torch from five seconds after the attempt's start; the job's
# first step comes some seconds later.
WINDOWS = {"all": (0.0, math.inf), "first 4 s": (0.0, 4.0), "after": (4.0, math.inf)}
# How a process of saferun's is known by its command line.
ROLES = (("exec(read(", "warm agent"), ("keeper_main", "keeper"), ("nvidia-smi", "nvidia-smi"))
# Student's t for a 95 % interval, by degrees of freedom.
T95 = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return [grand for child in found for grand in (child, *children(child))]


def cpu_seconds(pid: int) -> float:
    """User and system seconds of one process, without those of its children."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def role(pid: int) -> str | None:
    """Which of saferun's processes this is; None for the job's own."""
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return None
    line = " ".join(words)
    for word, name in ROLES:
        if word in line:
            return name
    return "saferun" if "saferun" in words else None


def sample(pid: int, used: dict[tuple[str, int], float], over: threading.Event) -> None:
    """Keep the highest reading of every process of ours, four times a second."""
    while not over.wait(0.25):
        for one in (pid, *children(pid)):
            name = role(one)
            if name is not None:
                used[name, one] = max(used.get((name, one), 0.0), cpu_seconds(one))


def run(way: str, seconds: float) -> dict[str, Any]:
    """One run: the blocks' times, wall seconds, and CPU seconds by process of saferun's."""
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*WAYS[way], "--standalone", "--nproc-per-node=1", str(JOB)]
    begin = time.monotonic()
    started = subprocess.Popen(
        [*command, f"--seconds={seconds}"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    used: dict[tuple[str, int], float] = {}
    over = threading.Event()
    sampler = threading.Thread(target=sample, args=(started.pid, used, over))
    sampler.start()
    stdout, stderr = started.communicate()
    over.set()
    sampler.join()
    if started.returncode:
        raise SystemExit(f"{way}: status {started.returncode}\n{stderr[-3000:]}")
    cpu: dict[str, float] = {}
    for (name, _), value in used.items():
        cpu[name] = cpu.get(name, 0.0) + value
    times = json.loads(stdout.splitlines()[-1])
    return {"times": times, "wall": time.monotonic() - begin, "cpu": cpu}


def step_s(result: dict[str, Any], program: str, column: int, window: str) -> float | None:
    """The mean step of one run in a window, or None where nothing was measured."""
    low, high = WINDOWS[window]
    rows = [row for row in result["times"][program] if low <= row[0] < high]
    values = [row[column] for row in rows if row[column] is not None]
    return statistics.mean(values) if values else None


def row(rounds: list[dict[str, Any]], way: str, program: str, column: int, window: str) -> str:
    """One row of the table."""
    steps = [step_s(one[way], program, column, window) for one in rounds]
    plain = [step_s(one["torchrun"], program, column, window) for one in rounds]
    pairs = [(a, b) for a, b in zip(steps, plain, strict=True) if a and b]
    if not pairs:
        return ""
    ratios = [a / b for a, b in pairs]
    half = 0.0
    if len(ratios) > 2:
        half = T95.get(len(ratios) - 1, 2.2) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    clock = ("wall", "events")[column - 1]
    milliseconds = statistics.median(a for a, _ in pairs) * 1000
    return (
        f"| {program} | {clock} | {window} | {way} | {milliseconds:.3f} | "
        f"{statistics.mean(ratios):.4f} ± {half:.4f} |"
    )


def report(rounds: list[dict[str, Any]]) -> None:
    """Print both tables."""
    print(f"{len(rounds)} rounds")
    print("| bound by | clock | window | way | ms a step | ratio to torchrun, 95 % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for program in ("gpu", "host"):
        for column in (1, 2):
            for window in WINDOWS:
                for way in WAYS:
                    line = row(rounds, way, program, column, window)
                    if line:
                        print(line)
    print("\n| way | process | CPU s a run, mean | wall s a run |\n| --- | --- | --- | --- |")
    for way in WAYS:
        wall = statistics.mean(one[way]["wall"] for one in rounds)
        for name in sorted({name for one in rounds for name in one[way]["cpu"]}):
            mean = statistics.mean(one[way]["cpu"].get(name, 0.0) for one in rounds)
            print(f"| {way} | {name} | {mean:.2f} | {wall:.1f} |")


def main() -> None:
    """Measure, or load what was measured, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--load", type=pathlib.Path, nargs="*", default=[])
    given = parser.parse_args()
    rounds = [one for file in given.load for one in json.loads(file.read_text())]
    for number in range(0 if given.load else given.rounds):
        names = list(WAYS)
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        rounds.append({way: run(way, given.seconds) for way in order})
        if given.save:
            given.save.write_text(json.dumps(rounds))
        print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    report(rounds)


if __name__ == "__main__":
    main()
