"""One rank is late for a collective, once, and the others wait no longer."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from once import first_time

dist.init_process_group("gloo", timeout=timedelta(seconds=8))
if dist.get_rank() == 1 and first_time():
    signal.pause()  # until it is ended for the others' failure
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
os._exit(0)
