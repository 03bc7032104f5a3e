"""Call torch.cuda.empty_cache three times, with an allocator that notes it, and print the notes."""

import gc
import json

import torch

calls: list[str] = []
held = [300, 200, 100]  # MiB, before and after each clearing


def empty():
    calls.append("empty")


torch._C._cuda_emptyCache = empty
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
torch.cuda.memory_reserved = lambda: (held.pop(0) if held else 50) << 20
collect = gc.collect
gc.collect = lambda *a: (calls.append("gc"), collect(*a))[1]

from _saferun.inject.hook_runner import current  # noqa: E402 - where torch is replaced in part

current("").activate()
for _ in range(3):
    torch.cuda.empty_cache()
print(json.dumps(calls))
