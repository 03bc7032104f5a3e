"""Ranks of which rank 1 takes longer for a step of 0.2 s: `unequal_ranks.py FACTOR`, until ended.

The times of all of them vary by a twentieth. On GPUs, each rank waits for its own in each step.
"""

import os
import random
import sys
import time

import torch
import torch.distributed as dist

STEP_S = 0.2
factor = float(sys.argv[1])
on_gpu = torch.cuda.is_available()
device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
noise = random.Random(rank)
gradients = [torch.ones(1000 * n, device=device) for n in range(1, 9)]
step = 0
while True:
    time.sleep(STEP_S * max(0.5, noise.gauss(1, 0.05)))
    until = time.perf_counter() + (STEP_S * (factor - 1) if rank == 1 else 0.0)
    while time.perf_counter() < until:
        pass
    for one in gradients:
        dist.all_reduce(one)
        one.fill_(1.0)
    loss = gradients[0][0].item()
    if step % 10 == 0:
        print(f"step {step} loss {loss}", flush=True)
    step += 1
