"""Two ranks of NCCL that hang at the fourth collective, in the first attempt: `nccl_hang.py FAULT`.

`missing`: rank 1 does not enter it. `kernel`: rank 1's GPU is at a kernel that never ends. Where
there is one GPU both ranks use it: NCCL, which refuses that within a host, takes them for two.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def stay_away() -> None:
    while True:
        time.sleep(1)


def never_end() -> None:
    torch.cuda._sleep(1 << 60)  # clock cycles


local = int(os.environ["LOCAL_RANK"])
gpus = torch.cuda.device_count()
if gpus == 1:
    os.environ |= {"NCCL_HOSTID": f"host-{local}", "NCCL_SOCKET_IFNAME": "lo"}
torch.cuda.set_device(local % gpus)
dist.init_process_group("nccl")
one = torch.ones(1, device="cuda")
for step in range(1, 7):
    if step == 4 and local == 1 and os.environ.get("SAFERUN_ATTEMPT", "1") == "1":
        {"missing": stay_away, "kernel": never_end}[sys.argv[1]]()
    dist.all_reduce(one)
    torch.cuda.synchronize()
    print(f"step {step}", flush=True)
dist.destroy_process_group()
