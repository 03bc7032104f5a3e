"""Goes on by itself from what its rank finds, as many scripts do; each rank prints its steps.

With --sgd the optimizer counts no steps.
"""

import argparse
import os

import small_model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--sgd", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
path = os.path.join(args.out, "snapshot.pt")
raw = small_model.Model()
made = torch.optim.SGD if args.sgd else torch.optim.AdamW
optimizer = made(raw.parameters(), lr=1e-2)
step, value = 0, torch.zeros(())
if os.path.exists(path):
    try:
        snapshot = torch.load(path)
        raw.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        step = snapshot["step"]
    except (RuntimeError, EOFError, OSError):
        print(f"rank {rank}: no snapshot can be read, it begins anew", flush=True)
model = DistributedDataParallel(raw)
os.makedirs(args.out, exist_ok=True)
pace = small_model.Pace()
while step < args.steps:
    step += 1
    loss = model(**small_model.batch(step, rank))["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.detach()
    if step % 10 == 0:
        print(f"rank {rank} step {step} loss {value:.4f}", flush=True)
        if rank == 0:
            state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)
    pace.wait()
if rank == 0:
    small_model.report(raw, value)
dist.destroy_process_group()
