"""Two ranks of NCCL that hang at the fourth collective, in the first attempt: `nccl_hang.py FAULT`.

`missing`: rank 1 does not enter it; `loop`: for an endless loop; `stop`: it is stopped; `leave`: it
ends with status 0, and its communicator stays. `kernel`: rank 1's GPU is at a kernel that never
ends. Where there is one GPU both ranks use it: NCCL, which refuses that within a host, takes them
for two.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def stay_away() -> None:
    while True:
        time.sleep(1)


def loop_for_ever() -> None:
    while True:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(0)


def never_end() -> None:
    torch.cuda._sleep(1 << 60)  # clock cycles


FAULTS = {"missing": stay_away, "loop": loop_for_ever, "stop": stop, "leave": leave}
FAULTS["kernel"] = never_end
local = int(os.environ["LOCAL_RANK"])
gpus = torch.cuda.device_count()
if gpus == 1:
    os.environ |= {"NCCL_HOSTID": f"host-{local}", "NCCL_SOCKET_IFNAME": "lo"}
torch.cuda.set_device(local % gpus)
dist.init_process_group("nccl")
one = torch.ones(1, device="cuda")
for step in range(1, 7):
    if step == 4 and local == 1 and os.environ.get("SAFERUN_ATTEMPT", "1") == "1":
        FAULTS[sys.argv[1]]()
    dist.all_reduce(one)
    torch.cuda.synchronize()
    print(f"step {step}", flush=True)
dist.destroy_process_group()
