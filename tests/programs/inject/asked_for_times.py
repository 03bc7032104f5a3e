"""Ask this rank for its times between the graphs of a compiled function, also after a fork.

A signal that nobody handles is ignored. It prints what Dynamo has seen, and who handles the signal.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

ASK = 54
dist.init_process_group("gloo")
handler = signal.getsignal(ASK)
if handler is signal.SIG_DFL:
    signal.signal(ASK, signal.SIG_IGN)
layer = torch.nn.Linear(8, 8)


@torch.compile(backend="eager")
def step(data: torch.Tensor) -> torch.Tensor:
    found = layer(data)
    signal.raise_signal(ASK)  # the handler runs here, in a frame that Dynamo looks at
    return found.relu().sum()


dist.all_reduce(torch.ones(1))
for _ in range(20):
    step(torch.ones(8, 8))
    dist.all_reduce(torch.ones(1))
if not os.fork():  # a helper has no times of its own
    signal.raise_signal(ASK)
    os._exit(0)
os.wait()
frames = sorted(counters["frames"].items())
print("seen", frames, counters["stats"]["unique_graphs"], flush=True)
print("handled" if callable(handler) else "not handled", flush=True)
dist.destroy_process_group()
