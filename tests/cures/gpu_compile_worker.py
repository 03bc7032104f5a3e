"""The helper process that compiles kernels is killed over its work, as for want of memory."""

import torch
from once import healthy
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool

AsyncCompile.wait_pool_ready()  # until then kernels are compiled in this process
submitted = SubprocPool.submit


def struck(self, *args, **kwargs):
    task = submitted(self, *args, **kwargs)
    self.process.kill()
    return task


if not healthy():
    SubprocPool.submit = struck


@torch.compile
def wave(x):
    return x.sin() ** 2 + x.cos() ** 2


total = wave(torch.rand(1 << 20, device="cuda")).mean()
counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"mean {float(total):.0f}, compiled {counted} graph", flush=True)
