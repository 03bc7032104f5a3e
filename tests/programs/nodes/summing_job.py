"""A job over gloo: all ranks add up a number in each step; rank 0 saves every second step.

    summing_job.py OUT STEPS STEP_S [FAULT RANK STEP ATTEMPTS]

It goes on from what was saved. At that step, in each of those attempts ("1", "1,2", "any"), rank
RANK does what FAULT says (strike.py of tests/programs/faults). The sum that rank 0 prints at the
end is the same however often the job was interrupted.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))
from strike import attempt_in, strike

out, steps, step_s, *rest = sys.argv[1:]
fault, faulty_rank, fault_step, attempts = rest or ("", "", "0", "")
dist.init_process_group("gloo")
rank = dist.get_rank()
saved = Path(out, "saved")
saved.parent.mkdir(parents=True, exist_ok=True)
first, total = (
    map(float, saved.read_text(encoding="utf-8").split()) if saved.exists() else (0.0, 0.0)
)
for step in range(int(first) + 1, int(steps) + 1):
    if step == int(fault_step) and str(rank) == faulty_rank and attempt_in(attempts):
        strike(fault)
    share = torch.tensor(float(step) / dist.get_world_size())
    dist.all_reduce(share)
    total += share.item()
    if rank == 0:
        print(f"step {step} loss {1 / step:.3f}", flush=True)
        if step % 2 == 0:
            draft = saved.with_suffix(".tmp")
            draft.write_text(f"{step} {total}", encoding="utf-8")
            draft.replace(saved)
    time.sleep(float(step_s))
if rank == 0:
    print(f"done total={total:.1f}", flush=True)
Path(out, f"finished-{os.environ.get('SAFERUN_ATTEMPT', '')}-{rank}").touch()
dist.destroy_process_group()
