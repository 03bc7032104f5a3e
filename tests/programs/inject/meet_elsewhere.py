"""Two ranks meet in the PLACE that is asked for; rank 1 has another CUDA, where it is given."""

import os

import torch
import torch.distributed as dist

rank, place = int(os.environ["RANK"]), os.environ["PLACE"]
torch.version.cuda = os.environ.get("CUDA") if rank == 1 else None
if place == "file":
    meet = "file://" + os.getcwd() + "/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
elif place == "custom-store":
    store = dist.FileStore(os.getcwd() + "/meet", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
else:
    dist.init_process_group("gloo")
print("through", flush=True)
dist.barrier()  # or one may leave while the other still connects
