"""What the watches cost beside a job, and how soon that for hangs reports.

    python benchmarks/watch.py [--pairs 3] [--minutes 1] [--ranks 8]

CPU time of saferun beside ranks that print a step a second, with the watch and without it, two runs
at a time; then the seconds from a limit of 20 s to the report in the journal, for a job of torch
and gloo whose last rank leaves the others in a collective. The ranks print when they last did
something. Last, what it costs ranks to be asked for the times of their collectives: the time of an
answer with a full record, and a step after NCCL was told to time its collectives against one
before (`--pairs 0` leaves out the rest).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = """
import itertools, time
for n in itertools.count():
    print("step", n, flush=True)
    time.sleep(1)
"""
HANGS = """
import os, sys
if os.environ["SAFERUN_ATTEMPT"] != "1":
    sys.exit()
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
for _ in range(10):
    dist.all_reduce(one)
print("LAST", time.time(), flush=True)
while dist.get_rank() == dist.get_world_size() - 1:
    pass
dist.all_reduce(one)
"""
ASKED = """
import os, signal, statistics, time, torch, torch.distributed as dist
gpu = torch.cuda.is_available()
device = "cuda:" + os.environ["LOCAL_RANK"] if gpu else "cpu"
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
size = 4096 if gpu else 256
data, parts = torch.ones(size, size, device=device), torch.ones(4, 1 << 18, device=device)

def step():
    began = time.perf_counter()
    for part in parts:
        data @ data
        dist.all_reduce(part)
    parts.fill_(1.0)
    parts[0, 0].item()
    return time.perf_counter() - began

def asked(number):
    began = time.perf_counter()
    signal.raise_signal(number)
    return time.perf_counter() - began

for _ in range(520):
    step()
before = statistics.median(step() for _ in range(200))
answer = asked(54)
asked(55)
after = statistics.median(step() for _ in range(200))
if dist.get_rank() == 0:
    print("ASKED", answer, after / before, flush=True)
dist.destroy_process_group()
"""
LIMIT_S = 20
TICKS = os.sysconf("SC_CLK_TCK")


def start(folder: str, text: str, *words: str) -> subprocess.Popen[str]:
    script = pathlib.Path(folder) / "job.py"
    script.write_text(text)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "HOME": folder, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "saferun", "--profile=cpu", *words, str(script)]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pair(minutes: float, ranks: int) -> list[float]:
    """Return the CPU time of saferun in so many minutes, without the watch and with it."""
    folders = [tempfile.TemporaryDirectory() for _ in range(2)]
    runs = [
        start(folder.name, STEPS, "--set", f"watch.mode={mode}", f"--nproc-per-node={ranks}")
        for mode, folder in zip(("off", "warn"), folders, strict=True)
    ]
    time.sleep(20)  # saferun loads the rest, and makes the next attempt ready, in the first seconds
    before = [cpu_s(run.pid) for run in runs]
    time.sleep(60 * minutes)
    used = [cpu_s(run.pid) - was for run, was in zip(runs, before, strict=True)]
    for run, folder in zip(runs, folders, strict=True):
        run.send_signal(signal.SIGTERM)
        run.communicate()
        folder.cleanup()
    return used


def delay_s(ranks: int) -> float:
    """Return the seconds from the limit to the report in the journal, by the last rank's clock."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--set", "watch.mode=end", "--set", f"watch.silence_s={LIMIT_S}", "--retries=1"]
        run = start(folder, HANGS, *words, f"--nproc-per-node={ranks}")
        out, _ = run.communicate()
        (journal,) = pathlib.Path(folder).glob(".local/state/saferun/runs/*/events.jsonl")
        events = [json.loads(line) for line in journal.read_text().splitlines()]
    last = max(float(line.split()[1]) for line in out.splitlines() if line.startswith("LAST"))
    hang = next(event for event in events if event["event"] == "hang")
    return float(hang["at"]) - last - LIMIT_S


def asked(ranks: int) -> tuple[float, float]:
    """Return the seconds of an answer in a rank, and a step after it against one before."""
    with tempfile.TemporaryDirectory() as folder:
        run = start(folder, ASKED, f"--nproc-per-node={ranks}")
        out, err = run.communicate()
    line = next((line for line in out.splitlines() if line.startswith("ASKED")), "")
    if not line:
        sys.exit(err)
    answer_s, ratio = map(float, line.split()[1:])
    return answer_s, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    seconds = 60 * options.minutes
    rows = [pair(options.minutes, options.ranks) for _ in range(options.pairs)]
    for off, on in rows:
        print(f"CPU of saferun in {seconds:.0f} s: {off:.2f} s off, {on:.2f} s on", flush=True)
    if rows:
        more = statistics.median(on - off for off, on in rows) / seconds
        print(f"median difference: {more:.3%} of one core", flush=True)
    for _ in range(options.pairs):
        late = delay_s(options.ranks)
        print(f"{options.ranks} ranks: reported {late:.1f} s after the limit", flush=True)
    answer_s, ratio = asked(options.ranks)
    often = 1 + answer_s / 600
    print(
        f"an answer with the times: {answer_s * 1000:.0f} ms in a rank, a step ratio of {often:.5f}"
    )
    print(f"a step after NCCL was told to time its collectives: {ratio:.4f} of one before")


if __name__ == "__main__":
    main()
