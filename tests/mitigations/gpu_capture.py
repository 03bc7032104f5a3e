"""An operation that waits for the GPU, inside a part that is to become a CUDA graph."""

import torch
from once import healthy


@torch.library.custom_op("mitigations::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x / (x.shape[0] if healthy() else x.sum().item() * 0 + x.shape[0])


@scaled.register_fake
def _(x):
    return torch.empty_like(x)


@torch.compile(mode="reduce-overhead")
def wave(x):
    return scaled(x.sin() ** 2 + x.cos() ** 2).sum()


x = torch.rand(1 << 16, device="cuda")
with torch.no_grad():
    for _ in range(4):
        total = float(wave(x))
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"sum {total:.0f}, compiled {counted} graph", flush=True)
