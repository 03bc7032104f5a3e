"""Rank 0 of two tries the code in FAULTS, and tells whether a frame of ours is in the traceback."""

import json
import os
import traceback

import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: F401, N817 - faults use it
from torch.distributed.fsdp import fully_shard  # noqa: F401 - faults use it
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: F401, N817 - faults use it

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    for code in json.loads(os.environ["FAULTS"]):
        try:
            exec(code)
            print("no error:", code)
        except Exception as error:
            print(type(error).__name__, "inject" in "".join(traceback.format_exception(error)))
store = dist.distributed_c10d._get_default_store()
store.set(f"end{dist.get_rank()}", "")
store.wait(["end0", "end1"])
