"""The connections of one rank are cut in the middle of a collective, once."""

import contextlib
import os
import socket

import torch
import torch.distributed as dist
from once import first_time

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and first_time():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if str(one.getpeername()[1]) != os.environ["MASTER_PORT"]:  # not the store's
                one.shutdown(socket.SHUT_RDWR)
for _ in range(3):
    total = torch.ones(1)
    dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
os._exit(0)
