"""Saves as nanochat's base_train: a model, its metadata, and an optimizer state of each rank."""

import argparse
import json
import os

import small_model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--resume-from-step", type=int, default=-1)
parser.add_argument("--num-iterations", type=int, default=400)
parser.add_argument("--save-every", type=int, default=10)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
folder = os.path.join(os.environ["NANOCHAT_BASE_DIR"], "base_checkpoints", f"d{args.depth}")
raw = small_model.Model()
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
step, value = 0, torch.zeros(())


def names(number):
    parts = f"model_{number:06d}.pt", f"meta_{number:06d}.json", f"optim_{number:06d}_rank{rank}.pt"
    return [os.path.join(folder, part) for part in parts]


if args.resume_from_step != -1:
    of_model, of_meta, of_optimizer = names(args.resume_from_step)
    raw.load_state_dict(torch.load(of_model))
    optimizer.load_state_dict(torch.load(of_optimizer))
    with open(of_meta, encoding="utf-8") as file:
        step = json.load(file)["step"]
    print(f"Resuming optimization from step {step}", flush=True)
model = DistributedDataParallel(raw)
os.makedirs(folder, exist_ok=True)
pace = small_model.Pace()
while step < args.num_iterations:
    loss = model(**small_model.batch(step, rank))["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    value = loss.detach()
    if step % args.save_every == 0:
        of_model, of_meta, of_optimizer = names(step)
        if rank == 0:
            print(f"step {step:05d}/{args.num_iterations} | loss: {value:.6f}", flush=True)
            torch.save(raw.state_dict(), of_model)
            with open(of_meta, "w", encoding="utf-8") as file:
                json.dump({"step": step}, file)
        torch.save(optimizer.state_dict(), of_optimizer)
    pace.wait()
if rank == 0:
    small_model.report(raw, value)
dist.destroy_process_group()
