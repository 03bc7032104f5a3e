"""One rank reads at address 0, once."""

import ctypes
import os

import torch
import torch.distributed as dist
from once import first_time

dist.init_process_group("gloo")
if dist.get_rank() == 1 and first_time():
    ctypes.string_at(0)
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
os._exit(0)
