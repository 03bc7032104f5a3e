"""DDP with buckets under 1 MiB: torch.compile's optimizer for DDP refuses such buckets."""

import os

import torch
import torch.distributed as dist
from once import healthy
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(400, 400)
        self.second = torch.nn.Linear(400, 400)

    def forward(self, x):
        return self.second(self.first(x).relu())


dist.init_process_group("gloo")
if dist.get_rank():
    torch._dynamo.config.optimize_ddp = "ddp_optimizer"  # its other name
model = DistributedDataParallel(Net(), bucket_cap_mb=25 if healthy() else 0.5)
model = torch.compile(model, backend="aot_eager")
model(torch.ones(4, 400)).sum().backward()
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"compiled {counted} graph", flush=True)
os._exit(0)  # not every gloo job of torch 2.13 survives its own exit (pytorch#190489)
