"""A training whose loss becomes NaN: `diverging.py STEPS FOLDER`.

It saves a checkpoint at every second step, prints a loss at every step, and goes on from the
checkpoint that follows `--resume`. From the step `--bad` on the loss is NaN; with `--heals` only
where no checkpoint was loaded.
"""

import argparse
import json
import pathlib
import time

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--bad", type=int, default=20)
parser.add_argument("--heals", action="store_true")
parser.add_argument("--resume", type=pathlib.Path)
given = parser.parse_args()

start = json.loads(given.resume.read_text())["step"] if given.resume else 0
bad = given.steps if given.heals and start else given.bad
for step in range(start, given.steps):
    loss = 2.0 - step / 100 if step < bad else float("nan")
    if step % 2 == 0:
        (given.folder / f"step-{step}.json").write_text(json.dumps({"step": step, "loss": loss}))
    print(f"step {step}: loss {loss:.3f}, val loss {loss:.3f}", flush=True)
    time.sleep(0.3 if step < given.steps - 1 else 0)
