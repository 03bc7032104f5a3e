"""What saferun costs before the user's script begins, measured in pairs.

    python benchmarks/launch.py [--pairs 15] [--nproc 1] [--only torch] [--json]

Each pair runs torchrun and saferun on the same script, one right after the other and in turns
first, so that a machine that slows down slows both. The clock starts just before exec and stops
in the script, which prints `time.monotonic_ns()` (one clock for all processes of a machine). The
commands that start nothing are timed from exec to exit. Medians in ms; the spread is the middle
half. The bounds are the project's speed table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPTS = {
    "plain": "import time; print(time.monotonic_ns(), flush=True)\n",
    "torch": "import torch, time; print(time.monotonic_ns(), flush=True)\n",
}
LAUNCH_BOUND_MS = {"plain": 200.0, "torch": 210.0}  # a rank may add 10 ms after its import of torch
COMMAND_BOUND_MS = 150.0
COMMANDS = {
    "saferun --help": ["--help"],
    "saferun plan": ["plan", "SCRIPT"],
    "saferun gen-shell": ["gen-shell", "--", "torchrun", "SCRIPT"],
}


class Row(NamedTuple):
    """One line of the table; times in ms."""

    what: str
    base: float | None  # torchrun's median
    value: float  # saferun's median
    difference: float  # median of the pairs' differences; the value itself without a base
    spread: tuple[float, float]  # first and third quartile of what `difference` is the median of
    bound: float
    samples: int

    @property
    def kept(self) -> bool:
        return self.difference <= self.bound


def first_line_ms(command: Sequence[str], clock: Callable[[], int] = time.monotonic_ns) -> float:
    """Run a launcher to its end; return the time from exec to the script's line."""
    began = clock()
    done = subprocess.run(command, capture_output=True, text=True)
    stamps = [int(word) for word in done.stdout.split() if word.isdecimal()]
    if done.returncode or not stamps:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return (min(stamps) - began) / 1e6


def wall_ms(command: Sequence[str]) -> float:
    """Run a command to its end; return the time that took."""
    began = time.monotonic_ns()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return (time.monotonic_ns() - began) / 1e6


def paired(one: Callable[[], float], other: Callable[[], float], pairs: int, warm_up: int):
    """Measure both `pairs` times, in turns first; return both lists without the warm-up."""
    ones, others = [], []
    for number in range(pairs + warm_up):
        if number % 2:
            others.append(other())
            ones.append(one())
        else:
            ones.append(one())
            others.append(other())
    return ones[warm_up:], others[warm_up:]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def launch_row(kind: str, script: str, options: argparse.Namespace) -> Row:
    count = ["--nproc-per-node", str(options.nproc)] if options.nproc else []
    torchrun = [options.torchrun, *count, script]
    saferun = [options.saferun, *options.saferun_option, *count, script]
    base, value = paired(
        lambda: first_line_ms(torchrun),
        lambda: first_line_ms(saferun),
        options.pairs,
        options.warm_up,
    )
    differences = [after - before for before, after in zip(base, value, strict=True)]
    what = {"plain": "first line", "torch": "first line after import torch"}[kind]
    return Row(
        what,
        statistics.median(base),
        statistics.median(value),
        statistics.median(differences),
        quartiles(differences),
        LAUNCH_BOUND_MS[kind],
        len(differences),
    )


def command_row(what: str, command: Sequence[str], options: argparse.Namespace) -> Row:
    times = [wall_ms(command) for _ in range(options.pairs + options.warm_up)][options.warm_up :]
    median = statistics.median(times)
    return Row(what, None, median, median, quartiles(times), COMMAND_BOUND_MS, len(times))


def exec_row(folder: str, script: str, options: argparse.Namespace) -> Row:
    """Until torchrun is executed: one that prints the time and ends, through saferun and alone.

    The rows above hold torchrun's own noise, which is larger than what they are to show; this one
    leaves it out, and with it the few ms of the hooks (benchmarks/inject.py).
    """
    empty = Path(folder, "bin", "torchrun")
    empty.parent.mkdir()
    empty.write_text("#!/bin/sh\ndate +%s%N\n")
    empty.chmod(0o755)
    # A saferun of PATH takes PATH's torchrun, any other that of its own environment.
    beside = os.path.dirname(options.saferun)
    os.environ["PATH"] = os.pathsep.join((str(empty.parent), beside, os.environ["PATH"]))
    saferun = [options.saferun, *options.saferun_option, script]
    base, value = paired(
        lambda: first_line_ms([str(empty), script], time.time_ns),
        lambda: first_line_ms(saferun, time.time_ns),
        2 * options.pairs,
        options.warm_up,
    )
    differences = [after - before for before, after in zip(base, value, strict=True)]
    return Row(
        "until torchrun is executed",
        statistics.median(base),
        statistics.median(value),
        statistics.median(differences),
        quartiles(differences),
        LAUNCH_BOUND_MS["plain"],
        len(differences),
    )


def measure(folder: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    paths = {}
    for kind, text in SCRIPTS.items():
        paths[kind] = os.path.join(folder, f"{kind}.py")
        Path(paths[kind]).write_text(text)
        if options.only in (None, kind):
            rows.append(launch_row(kind, paths[kind], options))
    for what, argv in COMMANDS.items():
        command = [options.saferun, *(paths["plain"] if w == "SCRIPT" else w for w in argv)]
        if options.only in (None, "commands"):
            if subprocess.run(command, capture_output=True).returncode:
                print(f"{what}: not there, left out", file=sys.stderr)
                continue
            rows.append(command_row(what, command, options))
    if options.only in (None, "exec"):
        rows.append(exec_row(folder, paths["plain"], options))
    return rows


def table(rows: Sequence[Row]) -> str:
    head = f"{'what':32}{'torchrun':>10}{'saferun':>10}{'cost':>9}{'middle half':>18}{'bound':>8}"
    lines = [head]
    for row in rows:
        base = "" if row.base is None else f"{row.base:.0f}"
        low, high = row.spread
        lines.append(
            f"{row.what:32}{base:>10}{row.value:>10.0f}{row.difference:>9.1f}"
            f"{f'{low:.1f} … {high:.1f}':>18}{row.bound:>8.0f}{'' if row.kept else '  EXCEEDED'}"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    beside = os.path.dirname(sys.executable)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    parser = argparse.ArgumentParser(description="Time the launch against torchrun's.")
    parser.add_argument("--pairs", type=int, default=15, help="pairs after the warm-up")
    parser.add_argument("--warm-up", type=int, default=2, help="pairs that do not count")
    parser.add_argument("--nproc", type=int, help="processes; torchrun's own default if left out")
    parser.add_argument("--torchrun", default=shutil.which("torchrun", path=path))
    parser.add_argument("--saferun", default=shutil.which("saferun", path=path))
    parser.add_argument(
        "--saferun-option", action="append", default=[], help="e.g. --saferun-option=--profile=cpu"
    )
    parser.add_argument("--only", choices=[*SCRIPTS, "commands", "exec"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in ("torchrun", "saferun"):
        if not getattr(options, name):
            parser.error(f"no {name} found; name one with --{name}")
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    return options


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(folder, options)
    if options.json:
        print(json.dumps([{**row._asdict(), "kept": row.kept} for row in rows], indent=2))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
