"""A kernel that dies on the GPU, once: "trap" at once, "stray" after many healthy steps."""

import sys

import torch
import triton
import triton.language as tl
from once import first_time


@triton.jit
def trap(out):
    lanes = tl.arange(0, 32)
    asm: tl.constexpr = "trap; mov.b32 $0, $1;"
    tl.store(out + lanes, tl.inline_asm_elementwise(asm, "=r,r", [lanes], tl.int32, False, 1))


@triton.jit
def stray(out):
    tl.store(out + (tl.program_id(0).to(tl.int64) + (1 << 42)), 1)


out = torch.zeros(32, dtype=torch.int32, device="cuda")
steps = 600 if sys.argv[1] == "stray" else 1
for step in range(1, steps + 1):
    out += 1
    print(f"step {step} loss 1.0", flush=True)
if first_time():
    {"trap": trap, "stray": stray}[sys.argv[1]][(1,)](out)
torch.cuda.synchronize()
print(f"done after {int(out[0])}", flush=True)
