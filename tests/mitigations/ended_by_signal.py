"""A timer that nobody handles ends one rank, once."""

import os
import signal

import torch
import torch.distributed as dist
from once import first_time

dist.init_process_group("gloo")
if dist.get_rank() == 1 and first_time():
    signal.raise_signal(signal.SIGALRM)
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
os._exit(0)
