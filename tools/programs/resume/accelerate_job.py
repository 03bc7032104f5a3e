"""A script with accelerate that saves `step_N`, as its example of checkpointing does."""

import argparse
import os

import small_model
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default=".")
parser.add_argument("--checkpointing_steps", type=int, default=10)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--max_steps", type=int, default=400)
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
model = small_model.Model(0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = torch.Generator()  # else each iterator would draw from the random state of the model
loader = DataLoader(small_model.Data(100_000), batch_size=4, generator=own)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
torch.manual_seed(11 + accelerator.process_index)
step, batches = 0, loader
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    step = int(os.path.basename(args.resume_from_checkpoint).removeprefix("step_"))
    batches = accelerator.skip_first_batches(loader, step)
pace = small_model.Pace()
loss = torch.zeros(())
for batch in batches:
    loss = model(**batch)["loss"]
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % args.checkpointing_steps == 0:
        accelerator.print(f"step {step} loss {loss.item():.4f}", flush=True)
        accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
    if step >= args.max_steps:
        break
    pace.wait()
if accelerator.is_main_process:
    small_model.report(accelerator.unwrap_model(model), loss.detach())
accelerator.end_training()
