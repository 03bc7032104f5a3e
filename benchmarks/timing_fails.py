"""A model that asks for autotuning in three ways, where to time a kernel is the incident's error.

On a CPU, which times none, the error is raised where a graph is lowered with autotuning on. Rank 0
prints what was in force for each graph, as JSON.
"""

import json
import os

import torch
import torch._inductor.config as config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

KEYS = ["max_autotune", "max_autotune_pointwise", "coordinate_descent_tuning", "triton.cudagraphs"]
device = "cuda" if torch.cuda.is_available() else "cpu"
original, graphs = GraphLowering.run, []


def fail(*args, **kwargs):
    raise RuntimeError("CUDA error: invalid argument")


def run(self, *args):
    values = config.get_config_copy()
    graphs.append({key: values[key] for key in KEYS})
    if device == "cpu" and values["max_autotune"]:
        fail()
    return original(self, *args)


GraphLowering.run = run
CachingAutotuner.bench = fail
config.force_disable_caches = True
config.coordinate_descent_tuning = True
torch.manual_seed(0)
block = torch.nn.Sequential(
    torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 256)
).to(device)
model = torch.compile(block, mode="max-autotune")
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
for _ in range(5):
    x = torch.randn(512, 256, device=device)
    loss = torch.nn.functional.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if os.environ["RANK"] == "0":
    print(json.dumps({"loss": loss.item(), "graphs": graphs, "device": device}))
