"""How long a job is down when a rank dies: from the death to the first line of its next life.

    python benchmarks/recovery.py [--pairs 7] [--after 10] [--backend gloo|nccl] [--json]

Each round runs all ways to come back, one after the other and in turns first:

    in-agent   torchrun --max-restarts=1, made to work by TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    saferun    the next attempt under saferun, whose warm agent waits by then (5 s into the job)
    saferun warm    the same, whose ranks are forked (start.ranks: warm)

Two ranks; rank 1 kills itself `--after` seconds after its first line. A first line is printed after
`import torch` and `init_process_group`. Medians in ms; the spread is the middle half. The memory is
that of the waiting agent shortly before the death.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

BOUND_MS = 400.0  # over torchrun's own working restart
ROOT = Path(__file__).resolve().parent.parent
WAYS = ("in-agent", "saferun", "saferun warm")
PHASES: dict[str, list[float]] = {}  # of saferun's way, ms
JOB = """
import os, signal, sys, time
import torch, torch.distributed as dist
log, after_s, backend = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rank, local = os.environ["RANK"], int(os.environ["LOCAL_RANK"])
if backend == "nccl": torch.cuda.set_device(local)
dist.init_process_group(backend)
def stamp(what):
    with open(log, "a") as file: file.write(f"{what} {time.time_ns()}\\n")
first = not os.path.exists(log + ".died")
print("first line of rank", rank, flush=True)
stamp("first" if first else "next")
dist.barrier()
if first:
    time.sleep(after_s if rank == "1" else 60)
    open(log + ".died", "w").close()
    stamp("death")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def down_ms(way: str, options: argparse.Namespace) -> tuple[float, dict[str, int]]:
    """Run a job that dies once; return how long it was down, and the warm agent's memory in KiB."""
    with tempfile.TemporaryDirectory() as folder:
        job, log = Path(folder, "job.py"), Path(folder, "log")
        job.write_text(JOB)
        argv = [
            "--standalone",
            "--nproc-per-node=2",
            str(job),
            str(log),
            str(options.after),
            options.backend,
        ]
        process = subprocess.Popen(
            [*command(way), *argv],
            env=environment(way, folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        memory: dict[str, int] = {}
        watch = threading.Timer(options.after + 2, lambda: memory.update(agent_kib(process.pid)))
        watch.start()
        _, errors = process.communicate(timeout=180)
        watch.cancel()
        stamps = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        moments = journal_moments(folder) if way.startswith("saferun") else {}
    died = [int(ns) for what, ns in stamps if what == "death"]
    lived = [int(ns) for what, ns in stamps if what == "next"]
    if process.returncode or not died or not lived:
        raise SystemExit(f"{way} did not come back ({process.returncode}):\n{errors}")
    if moments:
        reported = {"death": died[0] / 1e9, **moments, "first line": min(lived) / 1e9}
        steps = list(reported.items())
        for (before, at), (name, then) in itertools.pairwise(steps):
            PHASES.setdefault(f"{way}: {before} -> {name}", []).append((then - at) * 1000)
    return (min(lived) - died[0]) / 1e6, memory


def journal_moments(home: str) -> dict[str, float]:
    """When the first attempt had ended, the second was started, and its first rank's Python ran."""
    (run,) = Path(home).glob(".local/state/saferun/runs/*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ended = next(e["at"] for e in events if e["event"] == "ended")
    started = [e["at"] for e in events if e["event"] == "started"]
    receipts = [
        json.loads(path.read_text().splitlines()[0])["at"]
        for path in (run / "receipts").glob("a2-*.jsonl")
    ]
    if len(started) < 2 or not receipts:
        return {}
    return {"ended": ended, "started": started[1], "rank": min(receipts)}


def command(way: str) -> list[str]:
    if way.startswith("saferun"):
        ranks = "warm" if way == "saferun warm" else "spawn"
        return [sys.executable, "-m", "saferun", "--set", f"start.ranks={ranks}"]
    return [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1"]


def environment(way: str, home: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))}
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    env |= {"OMP_NUM_THREADS": "1", "HOME": home, "PYTHONPATH": path}
    bin_directory = str(Path(sys.executable).parent)
    env["PATH"] = f"{bin_directory}:{env.get('PATH', '')}"
    return env | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if way == "in-agent" else {})


def agent_kib(root: int) -> dict[str, int]:
    """What the waiting agent takes, by /proc/PID/smaps_rollup; empty where there is none."""
    for pid in descendants(root):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() != "saferun-warm":
                continue
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        kib = {row.split(":")[0]: int(row.split()[1]) for row in rows}
        own = kib["Private_Clean"] + kib["Private_Dirty"]
        return {"rss": kib["Rss"], "pss": kib["Pss"], "uss": own}
    return {}


def descendants(root: int) -> list[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        parents[int(name)] = int(text.rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, int]]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, int] = {}
    for number in range(options.pairs):
        turn = number % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            took, seen = down_ms(way, options)
            times[way].append(took)
            memory = seen or memory
    return times, memory


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def report(times: dict[str, list[float]], memory: dict[str, int]) -> None:
    base = times["in-agent"]
    print("| way back | down, ms | over in-agent, ms | middle half | ratio | bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way in WAYS:
        over = [value - own for value, own in zip(times[way], base, strict=True)]
        low, high = quartiles(over)
        median = statistics.median(times[way])
        ratio = median / statistics.median(base)
        cells = [way, f"{median:.0f}", f"{statistics.median(over):.0f}", f"{low:.0f} … {high:.0f}"]
        print("|", " | ".join([*cells, f"{ratio:.2f}", f"{BOUND_MS:.0f}"]), "|")
    steps = [f"{name} {statistics.median(ms):.0f}" for name, ms in PHASES.items()]
    print(f"\nsaferun's way, ms: {', '.join(steps)}.")
    sizes = ", ".join(f"{name.upper()} {kib / 1024:.0f} MiB" for name, kib in memory.items())
    print(f"\nA waiting warm agent: {sizes or 'not measured'} ({len(base)} rounds).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="rounds of both ways")
    parser.add_argument("--after", type=float, default=10.0, help="s from the first line to death")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--json", action="store_true", help="all samples, as JSON")
    options = parser.parse_args()
    began = time.monotonic()
    times, memory = measure(options)
    if options.json:
        print(json.dumps({"down_ms": times, "agent_kib": memory, "phases_ms": PHASES}))
    else:
        report(times, memory)
        print(f"{time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
