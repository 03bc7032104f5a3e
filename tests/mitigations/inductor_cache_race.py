"""Compile one function; what an earlier run cached of it may be damaged."""

import torch


@torch.compile
def wave(x):
    return (x.sin() + x.cos()).sum()


wave(torch.ones(64))
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"compiled {counted} graph", flush=True)
