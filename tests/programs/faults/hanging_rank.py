"""Two ranks of gloo that hang at the third step: `hanging_rank.py loop | fifo PATH`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def loop_for_ever() -> None:
    while True:
        pass


dist.init_process_group("gloo")
one = torch.ones(1)
for step in range(5):
    if step == 3 and dist.get_rank() == 1:
        if sys.argv[1] == "loop":
            loop_for_ever()
        if sys.argv[1] == "fifo":
            Path(sys.argv[2]).read_text()
    dist.all_reduce(one)
    print(f"step {step}", flush=True)
