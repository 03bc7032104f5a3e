"""Meet, add up, part: what every distributed job does first. The faults are around it."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
print(f"met {int(total)} of {os.environ['WORLD_SIZE']}", flush=True)
os._exit(0)  # not every gloo job of torch 2.13 survives its own exit (pytorch#190489)
