"""mp.spawn starts two ranks; rank 1 has another CUDA, where it is given."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, port):
    torch.version.cuda = os.environ.get("CUDA") if rank == 1 else None
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    print("through", flush=True)
    dist.barrier()  # or one may leave while the other still connects


if __name__ == "__main__":
    mp.spawn(main, (os.environ["MASTER_PORT"],), nprocs=2)
