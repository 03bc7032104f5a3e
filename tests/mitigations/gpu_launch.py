"""A generated kernel that asks for more shared memory than any GPU has.

Planted in its launcher, "load" before and "launch" after the kernel is loaded: torch refuses the
one, the driver the other, and both refusals are the real ones.
"""

import sys

import torch
import torch._inductor.config
from once import healthy
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

torch._inductor.config.triton.autotune_pointwise = False  # one candidate: nothing is timed
made = StaticTritonCompileResult.make_launcher


def planted(self):
    if sys.argv[1] == "load":
        self.kernel.shared = 1 << 30
    launcher = made(self)
    self.kernel.shared = 1 << 30
    return launcher


if not healthy():
    StaticTritonCompileResult.make_launcher = planted


@torch.compile
def wave(x):
    return x.sin() ** 2 + x.cos() ** 2


total = wave(torch.rand(1 << 22, device="cuda")).mean()
print(f"mean {float(total):.0f}", flush=True)
