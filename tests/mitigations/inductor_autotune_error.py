"""Tune a matrix product over candidates none of which can run here."""

import torch
import torch._inductor.config
from once import healthy

torch._inductor.config.max_autotune_gemm_backends = "ATEN" if healthy() else "TRITON"


@torch.compile(mode="max-autotune-no-cudagraphs")
def product(a, b):
    return a @ b


with torch.no_grad():
    total = product(torch.ones(64, 64), torch.ones(64, 64)).sum()
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"sum {float(total):.0f}, compiled {counted} graph", flush=True)
