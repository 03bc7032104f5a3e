"""Meet through NCCL, add up, part; the faults are around it."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
print(f"met {int(total)} of {os.environ['WORLD_SIZE']}", flush=True)
dist.destroy_process_group()
