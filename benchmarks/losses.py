"""The same losses with all hooks on as under torchrun, bit for bit, and no false alarm.

    python benchmarks/losses.py [--way WAY ...] [--ranks 2] [--at-a-time 1]

Each way to train of losses_job.py, and the example, runs under torchrun and under saferun with
every hook on that watches, and again under saferun with a planted fault: each rank reads all data.
Prints a table in Markdown. Exit status 1 where losses differ, where saferun says something about
the sound program, or does not name the line of the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("losses_job.py")
EXAMPLE = ROOT / "examples" / "train_gpt.py"
WAYS = {  # the package that each needs
    **{"ddp": "torch", "ddp_compiled": "torch", "fsdp": "torch", "fsdp2": "torch", "zero": "torch"},
    **{"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"},
    "example": "torch",
}
ALL = [
    *("guards.labels=on", "guards.embeddings=on", "guards.logits=on"),
    *("shards=warn", "order.mode=fix", "memory.clear_between_trials=true", "optuna.mode=on"),
    *("compile.fallback=on", "cudagraph_markers=off-when-distributed"),
    "compile.cudagraphs=off-when-distributed",
]
LOSS = re.compile(
    r"^(?:train|valid|loss|eval_loss|grad_norm) -?0x\S+$|(?:val_|train_)?loss\S* \S+", re.M
)
EXPECTED = "train on the same batches"


class Ran(NamedTuple):
    """What came of a run."""

    status: int
    losses: list[str]
    messages: list[str]  # saferun's, without the line at its start


def run(way: str, ranks: int, settings: list[str] | None, *, planted: bool = False) -> Ran:
    """Run a way to train.

    Args:
        way: a key of WAYS.
        ranks: how many.
        settings: of saferun's hooks; None for torchrun.
        planted: each rank reads all data.
    """
    start = [sys.executable, "-m", "torch.distributed.run" if settings is None else "saferun"]
    start += [f"--set=hooks.{one}" for one in settings or []]
    words = [str(PROGRAM), way]
    if way == "example":
        words = [str(EXAMPLE), "--steps", "40", "--eval-every", "20", "--max-seconds", "1e9"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*start, "--standalone", f"--nproc-per-node={ranks}", *words],
            cwd=folder,
            env={
                **os.environ,
                **{"PYTHONPATH": path, "HOME": folder, "OMP_NUM_THREADS": "1"},
                **{"PLANTED": str(int(planted)), "ACCELERATE_USE_CPU": "true"},
                **{"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            },
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("saferun: ")]
    return Ran(done.returncode, LOSS.findall(done.stdout), lines[1:])


def row(way: str, ranks: int) -> tuple[str, bool]:
    """Return a way's row of the table, and whether all is as it should be."""
    if importlib.util.find_spec(WAYS[way]) is None:
        return f"| {way} | not run: no {WAYS[way]} | | |", True
    plain, ours = run(way, ranks, None), run(way, ranks, ALL)
    same = bool(plain.losses) and plain.losses == ours.losses and plain.status == ours.status == 0
    losses = f"{len(plain.losses)}, {'the same' if same else 'others'}"
    said = " / ".join(ours.messages) or "nothing"
    if way == "example":
        return f"| {way} | {losses} | {said} | |", same and not ours.messages
    found = [line for line in run(way, ranks, ALL, planted=True).messages if EXPECTED in line]
    place = re.search(r"losses\.py:(\d+)", found[0]) if found else None
    named = place and "# here" in PROGRAM.read_text().splitlines()[int(place[1]) - 1]
    planted = "found, with its line" if named else f"found: {found}" if found else "missed"
    right = same and not ours.messages and bool(named)
    return f"| {way} | {losses} | {said} | {planted} |", right


def main() -> int:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", choices=[*WAYS])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--at-a-time", type=int, default=1)
    options = parser.parse_args()
    print("| program | losses, all hooks against torchrun | said | all data on each rank |")
    print("| --- | --- | --- | --- |")
    wrong = 0
    with ThreadPoolExecutor(options.at_a_time) as lanes:
        waiting = [lanes.submit(row, way, options.ranks) for way in options.way or WAYS]
        for done in as_completed(waiting):
            line, right = done.result()
            wrong += not right
            print(line, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
