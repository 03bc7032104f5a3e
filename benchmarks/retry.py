"""What the diagnosis adds to a retry: from the launcher's end until it is decided and said.

    python benchmarks/retry.py [--pairs 15]

A small job (no torch; `launcher: python`) fails once of a cause that a mitigation is for, and
succeeds with it. It writes 1 MiB to each of its streams before, as training does, of which saferun
keeps the ends, or only the failure; the two alternate. The loop itself is timed, inside saferun:
`diagnosis` is evidence, knowledge and classification, `in all` also receipts, decision, whether
the mitigation can be used, the journal's entry and the words. An attempt of more than 5 s finds
all of that loaded, since the loop makes it ready while the job runs; an earlier failure does not.
Medians in ms, by the clock, and of the processor's time, which other work on the machine touches
less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BOUND_MS = 50.0
READY_S = 6.0  # an attempt of this age finds the diagnosis loaded
TIMED = """
import json, os, sys, time
from saferun import __main__
from saferun.supervise import loop
from saferun.supervise.attempt import attempt_evidence

def timed(owner, name):
    original = getattr(owner, name)
    def run(self, *args, **kwargs):
        began, used = time.perf_counter(), time.process_time()
        try:
            return original(self, *args, **kwargs)
        finally:
            spans = (time.perf_counter() - began, time.process_time() - used)
            with open(os.environ["TIMES"], "a") as file:
                file.write(json.dumps([name, [span * 1000 for span in spans]]) + "\\n")
    setattr(owner, name, run)

timed(attempt_evidence.AttemptEvidence, "diagnosed")
timed(loop._Run, "_decide")
sys.exit(__main__.main(sys.argv[1:]))
"""
JOB = '''
import os, sys, time
size, age_s = int(sys.argv[1]), float(sys.argv[2])
if os.environ["SAFERUN_ATTEMPT"] == "1":
    line = "[rank{}]: 2026-01-01 10:00:{:02} step {} loss {:.4f} lr 3.0e-04 tok/s {} mfu 41.2%\\n"
    lines = [line.format(n % 8, n % 60, n, 9 / (n + 1), 120000 + n % 999) for n in range(20000)]
    text = "".join(lines)[:size]
    sys.stdout.write(text)
    sys.stderr.write(text)
    sys.stdout.flush()
    time.sleep(age_s)
    sys.stderr.write("""
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/me/train.py", line 214, in <module>
[rank3]:     loss.backward()
[rank3]:   File "/e/torch/_tensor.py", line 630, in backward
[rank3]:     torch.autograd.backward(
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 has a \\
total capacity of 79.11 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this \\
process has 77.90 GiB memory in use. Of the allocated memory 40.10 GiB is allocated by \\
PyTorch, and 36.20 GiB is reserved by PyTorch but unallocated.
""")
    sys.exit(1)
'''


class Sample(NamedTuple):
    """One run's times in ms."""

    diagnosis: float
    diagnosis_cpu: float
    in_all: float
    in_all_cpu: float


def one(size: int, age_s: float) -> Sample:
    """Run the job once; return the times of its failed attempt."""
    with tempfile.TemporaryDirectory(prefix="retry-") as folder:
        job, times = Path(folder, "job.py"), Path(folder, "times")
        job.write_text(JOB)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SAFERUN", "PET_"))}
        env = {**kept, "PYTHONPATH": str(ROOT / "src"), "HOME": folder, "TIMES": str(times)}
        argv = ["--profile=cpu", "--set", "launcher=python", str(job), str(size), str(age_s)]
        command = [sys.executable, "-c", TIMED, *argv]
        warm = [*command[:3], "diagnose", os.devnull]  # the knowledge is parsed once a machine
        subprocess.run(warm, env=env, capture_output=True, check=False)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode or "with expandable-segments" not in done.stderr:
            raise SystemExit(f"the job was not cured:\n{done.stderr[-2000:]}")
        reported = [json.loads(line) for line in times.read_text().splitlines()]
    first = dict(reversed(reported))
    return Sample(*first["diagnosed"], *first["_decide"])


def row(name: str, samples: list[Sample]) -> str:
    """Return one line of a Markdown table."""
    middle = (f"{statistics.median(column):.1f}" for column in zip(*samples, strict=True))
    ordered = sorted(sample.in_all for sample in samples)
    quarter = len(ordered) // 4
    half = f"{ordered[quarter]:.1f} … {ordered[-1 - quarter]:.1f}"
    return f"| {' | '.join((name, *middle, half, f'{BOUND_MS:.0f}'))} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    print(
        "| failed after, its output | diagnosis | processor | in all | processor | half | bound |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for age_s in (0.0, READY_S):
        little: list[Sample] = []
        much: list[Sample] = []
        for _ in range(pairs):
            little.append(one(0, age_s))
            much.append(one(1 << 20, age_s))
        print(row(f"{age_s:g} s, only the failure", little), flush=True)
        print(row(f"{age_s:g} s, 1 MiB on each stream", much), flush=True)


if __name__ == "__main__":
    main()
