"""Rank 1 comes to its init when rank 0 is through."""

import os
import pathlib
import time

import torch
import torch.distributed as dist

flag = pathlib.Path(__file__).with_name("flag")
if os.environ["RANK"] == "1":
    end = time.monotonic() + 30
    while not flag.exists() and time.monotonic() < end:
        time.sleep(0.01)
seen = os.environ["RANK"] == "0" or flag.exists()
dist.init_process_group("gloo")
flag.touch()
one = torch.ones(1)
dist.all_reduce(one)
os.write(1, f"{one.item()} {seen}\n".encode())  # in one piece: torchrun gives its ranks -u
dist.destroy_process_group()
