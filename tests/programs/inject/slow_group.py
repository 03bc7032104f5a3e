"""Rank 1 waits in its init until rank 0 is through with its own, for WAIT seconds at most.

Rank 0 stays until rank 1 has said what it saw: the group's store ends with rank 0.
"""

import os
import pathlib
import time

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

through = pathlib.Path("through")
said = pathlib.Path("said")
inner = c10d._new_process_group_helper


def slow(*args, **kwargs):
    made = inner(*args, **kwargs)
    end = time.monotonic() + float(os.environ["WAIT"])
    while not through.exists() and time.monotonic() < end:
        time.sleep(0.01)
    print("rank 0 is through", through.exists(), flush=True)
    said.touch()
    return made


if os.environ["RANK"] == "1":
    c10d._new_process_group_helper = slow
dist.init_process_group("gloo")
through.touch()
while not said.exists():
    time.sleep(0.01)
