"""Keep what every run of a CUDA graph returned, and use it at the end."""

import torch
from once import healthy


@torch.compile(mode="reduce-overhead")
def doubled(x):
    return x * 2


kept = []
with torch.no_grad():
    for number in range(4):
        out = doubled(torch.full((1 << 16,), float(number), device="cuda"))
        kept.append(out.clone() if healthy() else out)
    total = float(sum(one[0] for one in kept))
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"sum {total:.0f}, compiled {counted} graph", flush=True)
