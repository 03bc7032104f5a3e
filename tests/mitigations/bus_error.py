"""The file under one rank's memory map is cut off, once: a page of it is no longer there."""

import mmap
import os
import tempfile

import torch
import torch.distributed as dist
from once import first_time

dist.init_process_group("gloo")
if dist.get_rank() == 1 and first_time():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        page[0]
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
os._exit(0)
