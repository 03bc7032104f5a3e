"""What trying the GPUs costs: the test itself, torch's way, and a launch with and without it.

    python benchmarks/preflight.py [--runs 9] [--pairs 9] [--nproc 1]

The test is the whole process, from its start to its end, and the phases that it tells of itself.
Torch's way does the same through torch (a context on each GPU, 64 MiB written, copied and read
back). A launch is timed to the first line of a script without torch, in pairs, `preflight.mode`
being require and off in turns. Medians in ms. On a machine without GPUs an LD_LIBRARY_PATH with the
library of tests/lab/fakes makes the test and the launches run; FAKE_CUDA_INIT_MS is its cuInit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from launch import first_line_ms, paired, quartiles

from saferun.gpu.preflight import preflight

SOURCES = Path(__file__).resolve().parents[1] / "src"
TRIAL_BOUND_MS, LAUNCH_BOUND_MS = 1500.0, 50.0  # the first for 4 GPUs
SCRIPT = "import time; print(time.monotonic_ns(), flush=True)\n"
TORCH = """
import torch
for n in range(torch.cuda.device_count()):
    whole = torch.full((16 << 20,), n + 1, dtype=torch.int32, device=f"cuda:{n}")
    whole[8 << 20:] = whole[:8 << 20]
    assert bool((whole.cpu() == n + 1).all())
print(torch.cuda.device_count())
"""


def test() -> tuple[float, dict]:
    """Run the test; return its wall time in ms and what it told."""
    began = time.monotonic()
    with preflight.PreflightTest(os.environ) as asked:
        reported = asked.report(preflight.TIMEOUT_S)
    if not preflight.is_well(reported):
        raise SystemExit(f"the GPUs here are not well:\n{reported}")
    return (time.monotonic() - began) * 1000, reported


def tests(runs: int) -> dict[str, float]:
    """Return the medians of the test's phases, in ms; the first run warms the disk cache."""
    seen = [test() for _ in range(runs + 1)][1:]
    slowest = [max(d["seconds"] for d in reported["devices"].values()) for _, reported in seen]
    return {
        "GPUs": len(seen[0][1]["devices"]),
        "process": statistics.median(wall for wall, _ in seen),
        "cuInit": statistics.median(reported["init_s"] for _, reported in seen) * 1000,
        "context and memory, slowest GPU": statistics.median(slowest) * 1000,
    }


def torchs_way(runs: int) -> float | None:
    """Return the median time of the same through torch, in ms; None without a CUDA build."""
    times = []
    for _ in range(runs):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True)
        if done.returncode or done.stdout.strip() == "0":
            return None
        times.append((time.monotonic() - began) * 1000)
    return statistics.median(times)


def launches(folder: str, options: argparse.Namespace) -> tuple[float, float, list[float]]:
    """Return the medians without and with the preflight, and the pairs' differences, in ms."""
    script = Path(folder, "script.py")
    script.write_text(SCRIPT)
    head = [sys.executable, "-m", "saferun", "--run-dir", folder, "--profile", options.profile]
    tail = ["--nproc-per-node", str(options.nproc), str(script)]

    def launch(mode: str) -> float:
        return first_line_ms([*head, "--set", f"preflight.mode={mode}", *tail])

    off, on = paired(lambda: launch("off"), lambda: launch("require"), options.pairs, 1)
    apart = [after - before for before, after in zip(off, on, strict=True)]
    return statistics.median(off), statistics.median(on), apart


def launch_rows(options: argparse.Namespace) -> dict[str, float]:
    """Return what a launch costs without and with the preflight, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{SOURCES}:{path}" if path else str(SOURCES)
        os.environ["HOME"] = folder
        off, on, apart = launches(folder, options)
    low, high = quartiles(apart)
    return {
        "first line without the preflight": off,
        "first line with it": on,
        "difference": statistics.median(apart),
        "difference, first quartile": low,
        "difference, third quartile": high,
    }


def show(rows: Mapping[str, float | None]) -> None:
    """Print rows at once: what follows takes long, and may be cut off."""
    for name, value in rows.items():
        print(f"{name:<40} " + ("not here" if value is None else f"{value:8.0f}"), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="of the test; a third of torch's way")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--nproc", default="1")
    parser.add_argument("--profile", default="cuda")
    options = parser.parse_args()
    phases = tests(options.runs)
    show(phases)
    launched = launch_rows(options)
    show(launched)
    kept = phases["process"] <= TRIAL_BOUND_MS and launched["difference"] <= LAUNCH_BOUND_MS
    verdict = "kept" if kept else "NOT KEPT"
    print(f"bounds: {TRIAL_BOUND_MS:.0f} for 4 GPUs, {LAUNCH_BOUND_MS:.0f}: {verdict}", flush=True)
    show({"the same through torch": torchs_way(max(1, options.runs // 3))})


if __name__ == "__main__":
    main()
