"""Print inductor's settings where it lowers a graph, and what a broken backend comes to."""

import json

import torch
import torch._inductor.config as config
from torch._inductor.graph import GraphLowering

lowered = []
original = GraphLowering.run


def run(self, *args):
    lowered.append([config.max_autotune, config.triton.cudagraphs])
    return original(self, *args)


GraphLowering.run = run
weight = torch.randn(4, 4)


@torch.compile(mode="max-autotune")
def f(x):
    return x @ weight


def broken(graph, inputs):
    raise RuntimeError("planted")


def g(x):
    return x + 1


f(torch.randn(4, 4))
try:
    fell = torch.compile(g, backend=broken)(torch.zeros(1)).item() == 1
except Exception as error:
    fell = type(error).__name__
print(json.dumps({"lowered": lowered, "broken": fell}))
