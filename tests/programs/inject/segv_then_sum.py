"""Rank 1 dies of SIGSEGV; after torchrun's restart the ranks add up."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, turn = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
if turn == "0" and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, b"turn %d total %d\n" % (int(turn), int(total)))  # whole lines do not mix
dist.destroy_process_group()
