"""Saves as nanoGPT's train.py: one file, written in place, and read with --init_from=resume."""

import argparse
import os

import small_model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out_dir", default="out")
parser.add_argument("--init_from", default="scratch")
parser.add_argument("--max_iters", type=int, default=400)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
path = os.path.join(args.out_dir, "ckpt.pt")
raw = small_model.Model()
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
iter_num, value = 0, torch.zeros(())
if args.init_from == "resume":
    checkpoint = torch.load(path, map_location="cpu")
    raw.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, value = checkpoint["iter_num"], checkpoint["loss"]
model = DistributedDataParallel(raw)
os.makedirs(args.out_dir, exist_ok=True)
pace = small_model.Pace()
while iter_num < args.max_iters:
    loss = model(**small_model.batch(iter_num, rank))["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iter_num += 1
    value = loss.detach()
    if rank == 0 and iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {value:.4f}", flush=True)
        state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num, "loss": value}, path)
    pace.wait()
if rank == 0:
    small_model.report(raw, value)
dist.destroy_process_group()
