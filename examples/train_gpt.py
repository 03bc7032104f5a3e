"""Train a small character-level GPT on the source code of Python's standard library.

    python examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py
    torchrun --nproc-per-node gpu examples/train_gpt.py --layers 12 --width 768 --heads 12 \
        --block 1024 --batch 32 --lr 6e-4 --steps 2000 --compile

With --resume the run goes on from the checkpoint in --out, if there is one, and continues the very
data order, so it may simply be started again after an interruption. The last line that rank 0
prints is `done step=… train_loss=… val_loss=…`.
"""

import argparse
import gc
import itertools
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY = 128  # ASCII; every other byte becomes 127


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own sources.")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=16, help="sequences per process and step")
    parser.add_argument("--block", type=int, default=128, help="characters per sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers per process")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop after this time")
    return parser.parse_args()


def read_sources():
    """Return the characters to train on and the held-out ones; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[::10]
    del files[::10]
    return read(files), read(held_out)


def read(files):
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).clamp(max=VOCABULARY - 1)


class Windows(Dataset):
    """Consecutive windows of a text: a block of characters, and the same block one further on."""

    def __init__(self, text, block):
        self.text, self.block = text, block

    def __len__(self):
        return (len(self.text) - 1) // self.block

    def __getitem__(self, index):
        start = index * self.block
        window = self.text[start : start + self.block + 1].long()
        return window[:-1], window[1:]


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin its epoch after the first `skip` samples of this rank."""

    skip = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skip, None)


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        width, heads, dropout = arguments.width, arguments.heads, arguments.dropout
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(arguments.block, width)
        blocks = (Block(width, heads, dropout) for _ in range(arguments.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x, targets):
        positions = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.norm(self.blocks(self.characters(x) + self.positions(positions))))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def save(path, state):
    """Write a checkpoint so that an interruption at any point leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


class Trainer:
    """One process of the run: its share of the data, its replica of the model, its progress."""

    def __init__(self, arguments):
        self.arguments, self.started = arguments, time.monotonic()
        self.step = self.epoch = self.taken = 0  # taken: samples of this epoch, by all ranks
        self.train_loss = math.nan
        self.join()
        torch.manual_seed(arguments.seed)
        train_text, held_out_text = read_sources()
        self.held_out = Windows(held_out_text, arguments.block)
        self.load(Windows(train_text, arguments.block))
        self.build()
        size = sum(parameter.numel() for parameter in self.raw.parameters())
        ranks = f"{self.world} x {self.device.type}"
        self.say(f"{size:,} parameters, {len(train_text):,} characters, {ranks}")

    def join(self):
        """Join the process group, if there is one."""
        cuda, local_rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
        self.rank, self.world, self.device = 0, 1, torch.device("cpu")
        if cuda:
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if cuda else "gloo")
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def load(self, data):
        arguments = self.arguments
        self.sampler = ResumableSampler(
            data, self.world, self.rank, seed=arguments.seed, drop_last=True
        )
        self.loader = DataLoader(
            data,
            arguments.batch,
            sampler=self.sampler,
            num_workers=arguments.workers,
            pin_memory=self.device.type == "cuda",
            drop_last=True,
            generator=torch.Generator(),  # else making an iterator would draw from the model's
        )
        if not len(self.loader):
            raise SystemExit("a batch for every process needs more data: lower --batch or --block")

    def build(self):
        arguments = self.arguments
        self.raw = GPT(arguments).to(self.device)
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), weight_decay=0.1)
        self.precision = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
        )
        torch.manual_seed(arguments.seed + self.rank)  # same weights, but dropout of one's own
        self.path = arguments.out / "checkpoint.pt"
        if arguments.resume and self.path.exists():
            self.restore()
        self.model = self.raw
        if self.world > 1:
            ids = None if self.device.index is None else [self.device.index]
            self.model = DistributedDataParallel(self.raw, ids)
        if arguments.compile:
            self.model = torch.compile(self.model)

    def say(self, text, end="\n"):
        if self.rank == 0:
            print(text, end=end, flush=True)

    def mean(self, value):
        """Return the mean over all ranks."""
        if self.world > 1:
            dist.all_reduce(value)
        return value / self.world

    def learning_rate(self):
        """Linear warm-up, then a cosine down to a tenth."""
        total = self.arguments.steps
        warm_up = min(20, total // 10 + 1)
        progress = max(0, self.step - warm_up) / max(1, total - warm_up)
        peak = self.arguments.lr * min(1, (self.step + 1) / warm_up)
        return peak * (0.55 + 0.45 * math.cos(math.pi * progress))

    def update(self, x, y):
        """Make one optimizer step; return this rank's loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        x, y = (side.to(self.device, non_blocking=True) for side in (x, y))
        with self.precision:
            loss = self.model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.raw.parameters(), self.arguments.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.taken += self.arguments.batch * self.world
        return loss.detach().float()

    def train(self):
        arguments = self.arguments
        self.mark = time.monotonic(), self.step
        done = self.step >= arguments.steps
        while not done:
            self.sampler.set_epoch(self.epoch)
            self.sampler.skip = self.taken // self.world
            for x, y in self.loader:
                loss = self.update(x, y)
                done = self.step >= arguments.steps
                if done or self.step % arguments.log_every == 0:
                    done = self.report(loss) or done
                if self.step % arguments.eval_every == 0 and not done:
                    self.say(f"step {self.step} held-out loss {self.evaluate():.4f}")
                if done or self.step % arguments.save_every == 0:
                    self.checkpoint()
                if done:
                    break
            else:
                self.epoch, self.taken = self.epoch + 1, 0
        losses = f"train_loss={self.train_loss:.4f} val_loss={self.evaluate():.4f}"
        self.say(f"done step={self.step} {losses}")

    def report(self, loss):
        """Print the progress line; return whether time is up, on which all ranks agree."""
        now, arguments = time.monotonic(), self.arguments
        late = loss.new_tensor(now - self.started > arguments.max_seconds)
        self.train_loss, late = self.mean(torch.stack([loss, late])).tolist()
        tokens = (self.step - self.mark[1]) * arguments.batch * arguments.block * self.world
        rate = tokens / (now - self.mark[0])
        self.mark = now, self.step
        last = late > 0 or self.step >= arguments.steps
        end = "\r" if sys.stdout.isatty() and not last else "\n"
        self.say(f"step {self.step} loss {self.train_loss:.4f} {rate:,.0f} tokens/s", end)
        return late > 0

    @torch.no_grad()
    def evaluate(self):
        """Return the mean loss on 16 batches of held-out windows, shared among the ranks."""
        batch = self.arguments.batch
        count = min(16 * batch, len(self.held_out)) // self.world  # windows of each rank
        total = torch.zeros((), device=self.device)
        self.raw.eval()
        for start in range(0, count, batch):
            picked = range(start, min(start + batch, count))
            pairs = [self.held_out[self.rank + self.world * index] for index in picked]
            x, y = (torch.stack(side).to(self.device) for side in zip(*pairs, strict=True))
            with self.precision:
                total += self.raw(x, y) * len(pairs)
        self.raw.train()
        return self.mean(total / max(1, count)).item()

    def random_states(self):
        """Return the random states of each rank, on rank 0. (To gather objects takes NumPy.)"""
        cpu = torch.get_rng_state()
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else cpu[:0]
        mine = torch.cat([cpu, cuda]).to(self.device)
        states = [mine] * self.world
        if self.world > 1:
            states = [torch.empty_like(mine) for _ in states] if self.rank == 0 else []
            dist.gather(mine, states)
        parts = [state.cpu().split([len(cpu), len(cuda)]) for state in states]
        return [(first.clone(), second.clone()) for first, second in parts]

    def checkpoint(self):
        """Save all that the next step depends on; every rank calls this, and rank 0 writes."""
        states = self.random_states()
        if self.rank == 0:
            state = {name: getattr(self, name) for name in ("step", "epoch", "taken", "train_loss")}
            models = {"model": self.raw.state_dict(), "optimizer": self.optimizer.state_dict()}
            save(self.path, {**state, **models, "random": states})

    def restore(self):
        """Go on from the checkpoint, in the very data order that the interrupted run had."""
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        self.raw.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("step", "epoch", "taken", "train_loss"):
            setattr(self, name, state[name])
        if len(state["random"]) == self.world:  # another number of ranks begins new ones
            cpu, cuda = state["random"][self.rank]
            torch.set_rng_state(cpu)
            if self.device.type == "cuda" and len(cuda):
                torch.cuda.set_rng_state(cuda)
        self.say(f"resumed at step {self.step}")


def main():
    trainer = Trainer(parse_arguments())
    trainer.train()
    del trainer  # DDP holds the group, in cycles: gloo's threads must end before the interpreter
    gc.collect()  # does (https://github.com/pytorch/pytorch/issues/190489)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
