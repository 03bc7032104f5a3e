"""Two ranks of gloo, of which one does not enter the fourth collective; each dumps its record.

`recorded_rank.py DIRECTORY pickle|json`
"""

import os
import sys
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(4)
for _ in range(3):
    dist.all_reduce(one)
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    waits = dist.all_reduce(one, async_op=True)
content = c10d._dump_fr_trace() if sys.argv[2] == "pickle" else c10d._dump_fr_trace_json()
(Path(sys.argv[1]) / str(dist.get_rank())).write_bytes(content)
store.set(f"dumped {dist.get_rank()}", "")
store.wait(["dumped 0", "dumped 1"])
os._exit(0)  # rank 0 waits for ever otherwise
