"""Four ranks meet in gloo; in their first life rank 3 kills itself in the sixth step."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(30):
    total = torch.ones(1)
    dist.all_reduce(total)
    if first_life and step == 5 and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 0:
    print("recovered, sum", int(total))
dist.destroy_process_group()
