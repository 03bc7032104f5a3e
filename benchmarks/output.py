"""How fast a job's output passes through the supervisor, against the same job without it.

    python benchmarks/output.py [--rounds 5] [--mib 1024]

Bounds (medians): a pipe 500 MB/s, a terminal 100 MB/s, 32 MiB of memory in the keeper at any
volume, and no delay on a terminal that a person could feel. Rounds are paired: without, with.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import tty
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"
BLOCK = 1 << 16
SUPERVISE = (
    "import os, sys\n"
    "from saferun.supervise.attempt.attempt_runner import AttemptSpec, run_attempt\n"
    "run_attempt(AttemptSpec(sys.argv[1:], os.environ))"
)
WRITE = """
import os, sys
os.read(0, 1)
block = bytes(range(256)) * 256
for i in range(int(sys.argv[1]) * 16):
    view = memoryview(block)
    while view: view = view[os.write(1, view):]
os.read(0, 1)
"""
ECHO = """
import os
while data := os.read(0, 100): os.write(1, data)
"""


def start(code: str, arguments: list[str], out: int, supervised: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *arguments]
    if supervised:
        command = [sys.executable, "-c", SUPERVISE, *command]
    environ = {**os.environ, "PYTHONPATH": str(SOURCES)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, env=environ)


def terminal() -> tuple[int, int]:
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    return ours, theirs


def throughput(kind: str, mib: int, supervised: bool) -> tuple[float, float]:
    """Return MB/s and the keeper's peak of memory in MiB."""
    ours, theirs = os.pipe() if kind == "pipe" else terminal()
    job = start(WRITE, [str(mib)], theirs, supervised)
    left = mib << 20
    job.stdin.write(b"g")
    job.stdin.flush()
    select.select([ours], [], [])
    began = time.perf_counter()
    while left:
        left -= len(os.read(ours, BLOCK))
    took = time.perf_counter() - began
    memory = peak_mib(job.pid) if supervised else 0.0
    job.communicate(b"g")
    os.close(ours)
    os.close(theirs)
    return (mib << 20) / took / 1e6, memory


def peak_mib(saferun: int) -> float:
    for status in Path("/proc").glob("[0-9]*/status"):
        text = status.read_text()
        if text.startswith("Name:\tsaferun-keeper") and f"PPid:\t{saferun}\n" in text:
            return int(text.partition("VmHWM:")[2].split()[0]) / 1024
    raise RuntimeError("no keeper")


def latency(supervised: bool, times: int = 300) -> float:
    """Return the median time in µs from a key sent to the job until its echo on the terminal."""
    ours, theirs = terminal()
    job = start(ECHO, [], theirs, supervised)
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        job.stdin.write(b"k")
        job.stdin.flush()
        os.read(ours, 100)
        taken.append(time.perf_counter() - began)
    job.communicate()
    os.close(ours)
    os.close(theirs)
    return statistics.median(taken) * 1e6


def startup(supervised: bool) -> float:
    """Return the time in ms until the job's first byte."""
    began = time.perf_counter()
    job = start("import os; os.write(1, b'x')", [], subprocess.PIPE, supervised)
    job.stdout.read(1)
    took = time.perf_counter() - began
    job.communicate()
    return took * 1e3


def compare(name: str, unit: str, measure, rounds: int) -> None:
    pairs = [(measure(False), measure(True)) for _ in range(rounds)]
    without, with_us = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{name:28} without {without:8.0f} {unit:5} with {with_us:8.0f} {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    memory = []

    def carried(kind: str, mib: int):
        def measure(supervised: bool) -> float:
            rate, peak = throughput(kind, mib, supervised)
            memory.append(peak)
            return rate

        return measure

    compare("pipe", "MB/s", carried("pipe", options.mib), options.rounds)
    compare("terminal", "MB/s", carried("terminal", options.mib // 4), options.rounds)
    compare("terminal, key to echo", "us", latency, options.rounds)
    compare("first byte", "ms", startup, options.rounds * 3)
    print(f"{'keeper, peak of memory':28} {max(memory):.1f} MiB")


if __name__ == "__main__":
    main()
