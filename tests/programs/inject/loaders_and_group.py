"""The head of programs that make loaders, models and the group in one order or another.

They call `finish` at their end.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: F401, N817 - for what follows
from torch.utils.data import *  # noqa: F403 - for what follows

data = torch.utils.data.TensorDataset(torch.arange(8.0))
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def finish():
    """End together: gloo resets the connection of a rank that is in its last collective."""
    print("done", flush=True)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        store.add("end", 1)
        while store.add("end", 0) < size:
            time.sleep(0.02)
