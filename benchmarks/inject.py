"""What the injection costs a Python: paired runs, medians, differences in milliseconds.

    python benchmarks/inject.py [PAIRS]        (default 31; run it with the Python that has torch)

Each pair runs the same line without and with the injection, in turn first, so that a slow moment
of the machine falls on both. Time is the child's own CPU and wall time until it says it is there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from saferun.model import as_tree
from saferun.settings import CompileHook, HookSettings

SITE = Path(__file__).resolve().parents[1] / "src" / "saferun" / "inject" / "site"
SAY = "import os; os.write(1, b'.')"
_COMPILE = CompileHook(autotune="off", cudagraphs="off-when-distributed")
HOOKS = as_tree(HookSettings(compile=_COMPILE, cudagraph_markers="off-when-distributed"))
ROWS = (
    ("a Python that is not a rank", SAY, {}, 3),
    ("a rank before its first line", SAY, {"RANK": "0", "TORCHELASTIC_ERROR_FILE": "/nowhere"}, 5),
    ("a rank after import torch", "import torch; " + SAY, {"RANK": "0"}, 10),
)


def first_word_ms(code: str, env: dict[str, str]) -> tuple[float, float]:
    """Return the wall time to the child's first word and the CPU time of the whole child."""
    before = os.times()
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"."
        wall = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user + after.children_system
    return wall * 1e3, (cpu - before.children_user - before.children_system) * 1e3


def environs(extra: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment without and with the injection."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("SAFERUN_", "PYTHON"))}
    bare.update(extra)
    contract = {"v": 1, "run": "b", "attempt": 1, "hooks": HOOKS, "mitigations": []}
    text = json.dumps({**contract, "receipts": None})
    return bare, {**bare, "PYTHONPATH": str(SITE), "SAFERUN_INJECT": text}


def compare(code: str, extra: dict[str, str], pairs: int) -> tuple[float, float, float]:
    """Return the median wall time without us and the median wall and CPU differences."""
    both = environs(extra)
    walls, diffs, cpus = [], [], []
    for turn in range(pairs + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        took = {which: first_word_ms(code, both[which]) for which in order}
        if turn:  # the first pair warms the caches
            walls.append(took[0][0])
            diffs.append(took[1][0] - took[0][0])
            cpus.append(took[1][1] - took[0][1])
    return statistics.median(walls), statistics.median(diffs), statistics.median(cpus)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 31
    print(f"{pairs} pairs; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    for name, code, extra, bound_ms in ROWS:
        wall, diff, cpu = compare(code, extra, pairs)
        print(
            f"{name:32} {wall:8.1f} ms alone  {diff:+6.1f} ms with us (bound +{bound_ms})"
            f"  CPU {cpu:+6.1f} ms  ratio {(wall + diff) / wall:.3f}"
        )


if __name__ == "__main__":
    main()
