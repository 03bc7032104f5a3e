"""Does a training step take longer under saferun, and what do saferun's own processes use?

Runs of step_cost_job.py alternate between torchrun, saferun without a process beside the job
(`--retries 0`), supervised without the watch, and supervised as by default. A row is a way and a
program (bound by the GPU, or by the host): the median step of each run, the mean of their ratios to
torchrun's run of the same round with its 95 % confidence interval, by wall time and by CUDA events.
The second table has the CPU seconds of saferun's processes. Bound: 1.005.

A host's speed differs by some percent from one run to the next. `--toggle S` measures within one
supervised run of S seconds: saferun's processes are stopped and continued every second, and each
second with them is compared with the second without them that follows. `--beside S` runs a job that
prints ten lines a second, and reports the CPU seconds of saferun's processes alone.

    python benchmarks/step_cost.py [--rounds 12] [--seconds 10] [--save FILE] [--load FILE ...]
    python benchmarks/step_cost.py --toggle 120
    python benchmarks/step_cost.py --beside 600
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
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
PRINTS = (
    "import sys, time\nfor n in range({seconds} * 10):\n    print('step', n)\n    time.sleep(0.1)"
)
CLOCKS = {1: "wall", 2: "events"}
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


def ours(pid: int) -> dict[int, str]:
    """The processes of saferun's in a run, with what each is."""
    return {one: name for one in (pid, *children(pid)) if (name := role(one)) is not None}


def sample(pid: int, used: dict[tuple[str, int], float], over: threading.Event) -> None:
    """Keep the highest reading of every process of ours, four times a second."""
    while not over.wait(0.25):
        for one, name in ours(pid).items():
            used[name, one] = max(used.get((name, one), 0.0), cpu_seconds(one))


def toggle(pid: int, changes: list[tuple[float, bool]], over: threading.Event) -> None:
    """Stop and continue all processes of ours, a second each; note when each change was done."""
    running = True
    while not over.wait(1.0):
        running = not running
        for one in ours(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT if running else signal.SIGSTOP)
        changes.append((time.monotonic(), running))
    for one in ours(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)


def run(
    way: str,
    job: Sequence[str],
    toggled: tuple[float, list[tuple[float, bool]]] | None = None,
) -> dict[str, Any]:
    """One run: the blocks' times, wall seconds, and CPU seconds by process of saferun's.

    Args:
        way: a name of WAYS.
        job: the script and its arguments.
        toggled: for how many seconds saferun's processes are stopped and continued, from the moment
            that the next attempt's agent is ready; the changes are appended to the list.
    """
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    started = subprocess.Popen(
        [*WAYS[way], "--standalone", "--nproc-per-node=1", *job],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    used: dict[tuple[str, int], float] = {}
    over = threading.Event()
    sampler = threading.Thread(target=sample, args=(started.pid, used, over))
    sampler.start()
    if toggled is not None:
        seconds, changes = toggled
        time.sleep(20)
        enough = threading.Event()
        toggler = threading.Thread(target=toggle, args=(started.pid, changes, enough))
        toggler.start()
        time.sleep(seconds)
        enough.set()
        toggler.join()
    stdout, stderr = started.communicate()
    over.set()
    sampler.join()
    if started.returncode:
        raise SystemExit(f"{way}: status {started.returncode}\n{stderr[-3000:]}")
    cpu: dict[str, float] = {}
    for (name, _), value in used.items():
        cpu[name] = cpu.get(name, 0.0) + value
    times = json.loads(stdout.splitlines()[-1]) if job[0] == str(JOB) else {}
    return {"times": times, "wall": time.monotonic() - begin, "cpu": cpu}


def mean_step_s(
    times: list[list[float | None]], column: int, within: tuple[float, float] = (0.0, math.inf)
) -> float | None:
    """The mean step of the blocks that began within a time, or None where nothing was measured."""
    low, high = within
    rows = [row for row in times if low <= float(row[0] or 0.0) < high]
    values = [row[column] for row in rows if row[column] is not None]
    return statistics.mean(values) if values else None


def row(name: str, clock: int, pairs: list[tuple[float, float]]) -> str:
    """One row of a table: the median step, and the mean ratio of the pairs with its interval."""
    ratios = [a / b for a, b in pairs]
    half = 0.0
    if len(ratios) > 2:
        half = T95.get(len(ratios) - 1, 2.0) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    milliseconds = statistics.median(a for a, _ in pairs) * 1000
    mean = statistics.mean(ratios)
    return f"| {name} | {CLOCKS[clock]} | {milliseconds:.3f} | {mean:.4f} ± {half:.4f} |"


def report(rounds: list[dict[str, Any]]) -> None:
    """Print both tables of the alternating runs."""
    print(f"{len(rounds)} rounds")
    print("| bound by, way | clock | ms a step | ratio to torchrun, 95 % |\n" + "| --- " * 4 + "|")
    for program in ("gpu", "host"):
        for clock in CLOCKS:
            for way in WAYS:
                steps = [mean_step_s(one[way]["times"][program], clock) for one in rounds]
                plain = [mean_step_s(one["torchrun"]["times"][program], clock) for one in rounds]
                pairs = [(a, b) for a, b in zip(steps, plain, strict=True) if a and b]
                if pairs:
                    print(row(f"{program}, {way}", clock, pairs))
    print("\n| way | process | CPU s a run, mean | wall s a run |\n| --- | --- | --- | --- |")
    for way in WAYS:
        wall = statistics.mean(one[way]["wall"] for one in rounds)
        for name in sorted({name for one in rounds for name in one[way]["cpu"]}):
            mean = statistics.mean(one[way]["cpu"].get(name, 0.0) for one in rounds)
            print(f"| {way} | {name} | {mean:.2f} | {wall:.1f} |")


def report_toggled(times: dict[str, Any], changes: list[tuple[float, bool]]) -> None:
    """Print how a second with saferun's processes compares with the next one without them."""
    print("| bound by | clock | ms a step | with saferun's processes to without, 95 % |")
    print("| --- " * 4 + "|")
    spans = [(a, b, on) for (a, on), (b, _) in itertools.pairwise(changes)]
    for program in ("gpu", "host"):
        for clock in CLOCKS:
            pairs = []
            for first, second in zip(spans[::2], spans[1::2], strict=False):
                on, off = (first, second) if first[2] else (second, first)
                steps = [mean_step_s(times[program], clock, span[:2]) for span in (on, off)]
                if steps[0] and steps[1]:
                    pairs.append((steps[0], steps[1]))
            if pairs:
                print(row(program, clock, pairs))


def main() -> None:
    """Measure, or load what was measured, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--load", type=pathlib.Path, nargs="*", default=[])
    parser.add_argument("--toggle", type=int, metavar="S")
    parser.add_argument("--beside", type=int, metavar="S")
    given = parser.parse_args()
    if given.toggle:
        changes: list[tuple[float, bool]] = []
        job = [str(JOB), f"--seconds={given.toggle + 30}"]
        report_toggled(run("supervised", job, (given.toggle, changes))["times"], changes)
        return
    if given.beside:
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(PRINTS.format(seconds=given.beside))
            script.flush()
            result = run("supervised", [script.name])
        print(f"wall {result['wall']:.1f} s; CPU s: {result['cpu']}")
        return
    rounds = [one for file in given.load for one in json.loads(file.read_text())]
    for number in range(0 if given.load else given.rounds):
        names = list(WAYS)
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        rounds.append({way: run(way, [str(JOB), f"--seconds={given.seconds}"]) for way in order})
        if given.save:
            given.save.write_text(json.dumps(rounds))
        print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    report(rounds)


if __name__ == "__main__":
    main()
