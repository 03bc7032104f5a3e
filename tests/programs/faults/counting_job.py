"""A training job without torch: each rank counts steps, saves every fifth, and resumes from it.

    counting_job.py OUT STEPS [FAULT RANK STEP ATTEMPTS]

At that step of this process, in each of those attempts ("1", "1,2", "any"), rank RANK does what
FAULT says (strike.py) once the other ranks have come as far, and these wait, as they would in a
collective; with no such rank, all wait. It imports no torch, which costs each rank seconds of a
core.
"""

import os
import signal
import sys
import time
from pathlib import Path

from strike import attempt_in, strike

out, steps, *rest = sys.argv[1:]
fault, faulty_rank, fault_step, attempts = rest or ("", "", "0", "")
rank, size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
saved = Path(out, f"saved-{rank}")
saved.parent.mkdir(parents=True, exist_ok=True)
first = int(saved.read_text(encoding="utf-8")) if saved.exists() else 0
if first and rank == "0":
    print(f"resumed at step {first}", flush=True)
for step in range(first + 1, int(steps) + 1):
    if step - first == int(fault_step) and attempt_in(attempts):
        here = "here-" + os.environ.get("SAFERUN_ATTEMPT", "")
        Path(out, f"{here}-{rank}").touch()
        if rank == faulty_rank:
            while len(list(Path(out).glob(f"{here}-*"))) < size:
                time.sleep(0.01)
            strike(fault)
        signal.pause()
    if step % 5 == 0:
        draft = saved.with_suffix(".tmp")
        draft.write_text(str(step), encoding="utf-8")
        draft.replace(saved)
    if rank == "0":
        print(f"step {step} loss 1.0", flush=True)
if rank == "0":
    print(f"done step={steps}", flush=True)
