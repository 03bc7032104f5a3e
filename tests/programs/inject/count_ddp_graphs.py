"""Print into how many graphs a model in DDP is cut; MODE is what DDP's optimizer is set to."""

import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch._dynamo.config.optimize_ddp = json.loads(os.environ["MODE"])
graphs = []


def counting(graph, inputs):
    graphs.append(1)
    return graph.forward


dist._DEFAULT_FIRST_BUCKET_BYTES = 1024


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = DistributedDataParallel(Model(), bucket_cap_mb=0.02)
torch.compile(model, backend=counting)(torch.randn(2, 64))
if dist.get_rank() == 0:
    print("graphs", len(graphs), torch._dynamo.config.optimize_ddp)
dist.destroy_process_group()
