"""A small real training for tools/pictures.py: two ranks, checkpoints, and a crash that is planted.

    torchrun train.py STEPS CRASHES     CRASHES: "30,70", each once, in compiled code of rank 1

It goes on from the newest checkpoint in ckpt/, as many scripts do.
"""

import ctypes
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, crashes = int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
folder = pathlib.Path("ckpt")
folder.mkdir(exist_ok=True)
saved = sorted(folder.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
start = 0
if saved:
    state = torch.load(saved[-1])
    model.module.load_state_dict(state["model"])
    start = state["step"]
    if dist.get_rank() == 0:
        print(f"resumed at step {start}", flush=True)

for step in range(start + 1, steps + 1):
    x = torch.randn(64, 8)
    target = x.sum(1, keepdim=True) + 0.5 * torch.randn(64, 1)
    loss = ((model(x) - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.1)
    planted = pathlib.Path(f"crashed-{step}")
    if step in crashes and not planted.exists():
        dist.barrier()
        if dist.get_rank() == 1:
            planted.touch()
            ctypes.string_at(0)
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0 and step % 20 == 0:
        state = {"model": model.module.state_dict(), "step": step}
        torch.save(state, "ckpt/writing")
        pathlib.Path("ckpt/writing").rename(f"ckpt/step-{step}.pt")

dist.destroy_process_group()
