"""Compile a function that calls a Triton kernel with three configurations of the script's own."""

import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": size}) for size in (128, 256, 512)], key=["size"])
@triton.jit
def double(source, target, size, BLOCK: tl.constexpr):  # noqa: N803 - as Triton's own are written
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + places, mask=places < size)
    tl.store(target + places, 2 * values, mask=places < size)


@torch.compile(mode="max-autotune-no-cudagraphs")
def body(x):
    result = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, result, x.numel())
    return result.sin()


x = torch.rand(10000, device="cuda")
print("the same:", torch.allclose(body(x), (2 * x).sin()))
