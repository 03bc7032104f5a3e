"""Train for ten steps; LOADED has, for each rank, the step that its optimizer goes on from.

With MADE the optimizer makes a step before it loads, as torch.distributed.checkpoint has it do. A
rank whose word is `idle` makes no step at all.
"""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loaded = os.environ["LOADED"].split()[dist.get_rank()]
weight = torch.nn.Parameter(torch.ones(4))
optimizer = getattr(torch.optim, os.environ.get("OPTIMIZER", "AdamW"))([weight], lr=0.1)
if loaded.isdigit() and loaded != "0":
    weight.grad = torch.zeros(4)
    if "MADE" in os.environ:
        optimizer.step()
    zeros = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    state = {0: {"step": torch.tensor(float(loaded)), **zeros}}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
for _ in range(0 if loaded == "idle" else 10):
    weight.grad = torch.ones(4)
    optimizer.step()
dist.barrier()
print("trained", torch.optim.Optimizer._optimizer_step_code.__qualname__, flush=True)
