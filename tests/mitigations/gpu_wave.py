"""Compile one function for the GPU; the fault is around it."""

import torch


@torch.compile
def wave(x):
    return x.sin() ** 2 + x.cos() ** 2


total = wave(torch.rand(1 << 20, device="cuda")).mean()
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"mean {float(total):.0f}, compiled {counted} graph", flush=True)
