"""A job over gloo whose result tells whether all its ranks have always trained from one place.

    resuming_job.py OUT STEPS STEP_S [--from CHECKPOINT]

It begins at step 1, or after that checkpoint. Each rank brings its own step's number into the sum,
so that ranks at different steps, or a step done twice, give another weight at the end. The first
rank of each node saves OUT/checkpoint-N.json every fifth step, where it is not there: on a shared
file system one does.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

out, steps, step_s, *rest = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
state = (
    json.loads(Path(rest[1]).read_text(encoding="utf-8")) if rest else {"step": 0, "weight": 0.0}
)
Path(out).mkdir(parents=True, exist_ok=True)
attempt = os.environ.get("SAFERUN_ATTEMPT", "")
Path(out, f"begun-{attempt}-{rank}-{state['step']}").touch()
while state["step"] < int(steps):
    step = state["step"] + 1
    share = torch.tensor(float(step)) / dist.get_world_size()
    dist.all_reduce(share)
    state = {"step": step, "weight": round(state["weight"] * 0.9 + share.item(), 6)}
    path = Path(out, f"checkpoint-{step}.json")
    if step % 5 == 0 and os.environ["LOCAL_RANK"] == "0" and (rank == 0 or not path.exists()):
        draft = path.with_suffix(f".{rank}.tmp")
        draft.write_text(json.dumps(state), encoding="utf-8")
        draft.replace(path)
    if rank == 0:
        print(f"step {step} loss {1 / step:.3f}", flush=True)
    time.sleep(float(step_s))
print(f"done rank={rank} weight={state['weight']:.4f}", flush=True)
dist.destroy_process_group()
