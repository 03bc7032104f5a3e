"""A candidate of a generated kernel that the driver refuses to launch, met while it is timed.

Planted inside inductor's benchmarking: every candidate but the first asks for more shared memory
than any GPU has. The launch, the driver's refusal and the timing are the real ones.
"""

import torch
from once import healthy
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

timed = CachingAutotuner.bench


def planted(self, launcher, *args, **kwargs):
    if launcher is not self.launchers[0]:
        (chosen,) = (r for r in self.compile_results if r.config is launcher.config)
        chosen.kernel.shared = 1 << 30  # as read by StaticallyLaunchedTritonKernel.run
    return timed(self, launcher, *args, **kwargs)


if not healthy():
    CachingAutotuner.bench = planted


@torch.compile(mode="max-autotune-no-cudagraphs")
def wave(x):
    return x.sin() ** 2 + x.cos() ** 2


total = wave(torch.rand(1 << 22, device="cuda")).mean()
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"mean {float(total):.0f}, compiled {counted} graph", flush=True)
