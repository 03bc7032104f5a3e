"""A script with DeepSpeed's engine, with the options of Megatron-DeepSpeed."""

import argparse

import deepspeed
import small_model
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--save", required=True)
parser.add_argument("--load")
parser.add_argument("--load-tag")
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--train-iters", type=int, default=400)
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
raw = small_model.Model()
engine, *_ = deepspeed.initialize(
    model=raw,
    optimizer=torch.optim.AdamW(raw.parameters(), lr=1e-2),
    config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}},
    dist_init_required=False,
)
if args.load:
    engine.load_checkpoint(args.load, tag=args.load_tag)
pace = small_model.Pace()
value = torch.zeros(())
rank = torch.distributed.get_rank()
while engine.global_steps < args.train_iters:
    loss = engine(**small_model.batch(engine.global_steps, rank))["loss"]
    engine.backward(loss)
    engine.step()
    value = loss.detach()
    if engine.global_steps % 10 == 0:
        if rank == 0:
            print(f"step {engine.global_steps} loss {value:.4f}", flush=True)
        engine.save_checkpoint(args.save, tag=f"global_step{engine.global_steps}")
    pace.wait()
if rank == 0:
    small_model.report(raw, value)
torch.distributed.destroy_process_group()
