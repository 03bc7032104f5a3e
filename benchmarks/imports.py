"""What importing costs: the libraries that a launch does without, and the launch itself.

Each row is the median wall time of a fresh interpreter over that of one that imports nothing, runs
interleaved. These costs are why a launch reads cached profiles, keeps named tuples and decodes
YAML itself.

    python benchmarks/imports.py [--runs 21]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

ROWS = {
    "nothing": "pass",
    "re": "import re",
    "typing": "import re, typing",
    "json": "import re, json",
    "dataclasses": "import re, dataclasses",
    "yaml": "import re, yaml",
    "click": "import re, click",
    "filelock": "import re, filelock",
    "msgspec": "import re, msgspec",
    "importlib.metadata": "import re, importlib.metadata",
    "saferun's launch path": (
        "import saferun.__main__, saferun.planning.inputs, saferun.supervise.start, json"
    ),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(runs + 1):
        for name, code in ROWS.items():
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", code], capture_output=True)
            if done.returncode == 0:
                times[name].append((time.perf_counter() - start) * 1000)
    base = statistics.median(times["nothing"][1:])
    print(f"bare interpreter: {base:.1f} ms\n\n| import | + ms |\n| --- | --- |")
    for name, seen in times.items():
        if name == "nothing":
            continue
        shown = f"{statistics.median(seen[1:]) - base:.1f}" if seen else "not installed"
        print(f"| {name} | {shown} |")


if __name__ == "__main__":
    main()
