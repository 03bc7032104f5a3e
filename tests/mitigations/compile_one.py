"""Compile one function for the device that is named ("cpu", "cuda"); the faults are around it.

What an earlier run cached of it may be damaged; there may be no compiler.
"""

import sys

import torch


@torch.compile
def wave(x):
    return x.sin() ** 2 + x.cos() ** 2


mean = wave(torch.rand(1 << 16, device=sys.argv[1])).mean()
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"mean {float(mean):.0f}, compiled {counted} graph", flush=True)
