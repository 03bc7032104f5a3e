"""A training whose loss becomes NaN: `diverging.py STEPS FOLDER`.

It saves a checkpoint at every second step, prints a loss at every step, and goes on from the
checkpoint that follows `--resume`. From the step `--bad` on the loss is NaN; with `--heals` only
where no checkpoint was loaded. After its steps it ends where the journal has the loss, and with
`--stays` where it is ended.
"""

import argparse
import json
import pathlib
import time

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--bad", type=int, default=20)
parser.add_argument("--pace", type=float, default=0.03)
parser.add_argument("--heals", action="store_true")
parser.add_argument("--stays", action="store_true")
parser.add_argument("--resume", type=pathlib.Path)
given = parser.parse_args()

start = json.loads(given.resume.read_text(encoding="utf-8"))["step"] if given.resume else 0
bad = given.steps if given.heals and start else given.bad


def goes_on(step: int) -> bool:
    """Return whether there is another step: one without a number waits until somebody sees it."""
    if step < given.steps or bad >= given.steps:
        return step < given.steps
    journals = given.folder.glob("home/.local/state/saferun/runs/*/events.jsonl")
    return given.stays or not any('"loss"' in path.read_text(encoding="utf-8") for path in journals)


step = start
while goes_on(step):
    loss = 2.0 - step / 100 if step < bad else float("nan")
    if step % 2 == 0:
        (given.folder / f"step-{step}.json").write_text(
            json.dumps({"step": step, "loss": loss}), encoding="utf-8"
        )
    print(f"step {step}: loss {loss:.3f}, val loss {loss:.3f}", flush=True)
    step += 1
    time.sleep(given.pace)
