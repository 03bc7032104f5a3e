"""Reduce over NCCL and hold 20 GiB on each GPU: `nccl_job.py [SIGNAL [COUNTER]]`.

In the first attempt rank 1 dies of SIGNAL. COUNTER is the variable that counts restarts; without
one SAFERUN_ATTEMPT counts attempts.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

local, attempt = int(os.environ["LOCAL_RANK"]), os.environ.get("SAFERUN_ATTEMPT", "1")
if len(sys.argv) > 2:
    attempt = str(int(os.environ[sys.argv[2]]) + 1)
free, total = torch.cuda.mem_get_info(local)
print(json.dumps({"rank": local, "attempt": attempt, "free": free / total}), flush=True)
torch.cuda.set_device(local)
dist.init_process_group("nccl")
hold = torch.ones(20 << 30, dtype=torch.uint8, device=f"cuda:{local}")
x = torch.ones(1, device=f"cuda:{local}")
for step in range(1000):
    dist.all_reduce(x)
    x.fill_(1)
    torch.cuda.synchronize()
    if step == 0:
        print("up", flush=True)
    if len(sys.argv) > 1 and attempt == "1" and step == 100 and dist.get_rank() == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    if attempt != "1" and step == 20:
        break
    time.sleep(0.05)
dist.destroy_process_group()
print("finished", flush=True)
