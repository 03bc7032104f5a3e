"""How long `saferun diagnose` takes on long logs, in how much memory, and how often it is right.

    python benchmarks/diagnose.py [--mib 100] [--runs 3] [--json]

Each log is diagnosed by a fresh interpreter, from its start to its exit, with the knowledge already
cached (the first diagnosis on a machine also parses it). Medians in ms; the peak memory is that of
the process. The bound is the project's speed table. The table of verdicts needs the corpus of real
failures (SAFERUN_CORPUS, else ../shared/corpus); a third of it, by the hash of a record's id, was
not looked at while the first rules were written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from saferun.diagnosis import signatures

BOUND_MS = 1500.0
END = (
    b'Traceback (most recent call last):\n  File "/w/train.py", line 88, in <module>\nKeyError: 1\n'
)
PROGRAM = (
    "import resource, sys; from saferun.cli import diagnose; "
    "diagnose.run(sys.argv[1], 1); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
)
LOGS: dict[str, Callable[[], bytes]] = {
    "steps": lambda: (
        b"2026-01-01 10:00:00 step 12345 loss 2.3456 lr 0.0003 tok/s 123456\n" * 10_000
    ),
    "an error word a line": lambda: (
        b"[rank3]: step 12345 val_error 2.3 RuntimeError failed CUDA NCCL WARN signal 3\n" * 10_000
    ),
    "a progress bar": lambda: b" 12%|#2  | 120/1000 [00:12<01:28, 9.97it/s, error=0.3]\r" * 10_000,
    "tracebacks only": lambda: END * 10_000,
    "one endless line": lambda: b"a File Error(((((: " * 50_000,
    "random bytes": lambda: random.Random(0).randbytes(1 << 20),
}


class Row(NamedTuple):
    """One log's line of the table."""

    log: str
    mib: int
    median_ms: float
    peak_mib: int
    bound_ms: float


def measure(name: str, block: bytes, mib: int, runs: int) -> Row:
    """Write a log of that size and diagnose it several times."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "train.log")
        with open(path, "wb") as file:
            while file.tell() < mib << 20:
                file.write(block)
            file.write(END)
        samples = [one(path) for _ in range(runs + 1)][1:]
    times = statistics.median(sample[0] for sample in samples)
    return Row(name, mib, round(times, 1), max(sample[1] for sample in samples), BOUND_MS)


def one(path: str) -> tuple[float, int]:
    """Diagnose once; return ms and MiB."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=True
    )
    return (time.monotonic() - began) * 1000, int(done.stdout)


def verdicts(corpus: Path) -> list[str]:
    """Return how often verdict and kind are right, for both parts of the corpus."""
    from saferun.diagnosis import evidence
    from saferun.diagnosis.deciding import classify
    from saferun.diagnosis.foreign import long_log

    known = signatures.load()
    counts: dict[bool, list[int]] = {False: [0, 0, 0], True: [0, 0, 0]}
    for line in (corpus / "failure_logs.jsonl").read_text().splitlines():
        record = json.loads(line)
        code = record["exit"] if record["exit_shown"] else None
        log = long_log.read([record["log"].encode()])
        found = classify.classify(evidence.Evidence(log=log, exit_code=code), known)
        held = int(hashlib.sha256(record["id"].encode()).hexdigest(), 16) % 3 == 0
        right = (1, found.verdict == record["verdict"], found.kind == record["kind"])
        counts[held] = [a + b for a, b in zip(counts[held], right, strict=True)]
    return [
        f"{name}: verdict {v} of {n}, kind {k} of {n}"
        for name, (n, v, k) in (("first part", counts[False]), ("held-out part", counts[True]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(name, make(), options.mib, options.runs) for name, make in LOGS.items()]
    if options.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    print(f"{'log':24}{'MiB':>6}{'ms':>9}{'bound':>8}{'peak MiB':>10}")
    for row in rows:
        print(f"{row.log:24}{row.mib:6}{row.median_ms:9.0f}{row.bound_ms:8.0f}{row.peak_mib:10}")
    root = Path(__file__).resolve().parent.parent
    corpus = Path(os.environ.get("SAFERUN_CORPUS") or root.parent / "shared" / "corpus")
    print("\n".join(verdicts(corpus)) if corpus.is_dir() else f"no corpus at {corpus}")


if __name__ == "__main__":
    main()
