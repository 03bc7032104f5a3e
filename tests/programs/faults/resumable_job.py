"""A training job without torch that goes on only from the checkpoint that it is told.

    resumable_job.py --out DIR [--resume FILE] [--quiet] [--fault ATTEMPT:STEP:WHAT]...

It makes 20 steps and saves `checkpoint-N.zip` in DIR every fifth. WHAT is a name of strike.py, or
`cut` (it dies in the middle of a save), `garble` (it dies after a save that only looks whole) or
`full` (the file system of DIR is filled before that save).
What it prints at the end depends on every step.
"""

import argparse
import contextlib
import os
import pickle
import zipfile
from pathlib import Path

from strike import strike

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", default="none")
parser.add_argument("--quiet", action="store_true", help="print no steps")
parser.add_argument("--fault", action="append", default=[])
options = parser.parse_args()
faults = dict(fault.rsplit(":", 1) for fault in options.fault)
attempt = os.environ.get("SAFERUN_ATTEMPT", "1")
if "SLURM_RESTART_COUNT" in os.environ:
    attempt = "again"


def save(step: int, state: bytes) -> Path:
    """Save as torch does: in place, the directory of the zip last."""
    path = options.out / f"checkpoint-{step}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("state", state)
    return path


options.out.mkdir(parents=True, exist_ok=True)
step, weights = 0, 1
if options.resume != "none":
    print(f"loading checkpoint {options.resume}", flush=True)
    with zipfile.ZipFile(options.resume) as archive, archive.open("state") as file:
        step, weights = pickle.load(file)
    print(f"resumed at step {step}", flush=True)
while step < 20:
    step += 1
    weights = (weights * 31 + step) % 1_000_003
    if not options.quiet:
        print(f"step {step} loss {weights}", flush=True)
    what = faults.get(f"{attempt}:{step}", "")
    if what == "full":
        with contextlib.suppress(OSError), open(options.out / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        what = ""
    if step % 5 == 0:
        state = pickle.dumps((step, weights))
        path = save(step, state[:-4] if what == "garble" else state)
        if what == "cut":
            os.truncate(path, path.stat().st_size - 30)
    if what:
        strike("SIGKILL" if what in ("cut", "garble") else what)
print(f"done step={step} weights={weights}", flush=True)
