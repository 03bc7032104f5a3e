"""Train a small GPT, some steps whenever benchmarks/hooks_gpu.py asks for them.

WRAP is ddp or fsdp2, MODE eager, deterministic (eager, and the same losses each time) or a mode of
torch.compile, TURNS the address to connect to, NAME what this job is called there. Between its
turns a rank waits on its socket, and uses no GPU. The time of a turn is that of its median step.
"""

import itertools
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CUDA = torch.cuda.is_available()
WIDTH, HEADS, LAYERS, LENGTH, BATCH, WORDS = (
    (1536, 12, 6, 1024, 8, 32768) if CUDA else (16, 2, 2, 8, 2, 64)
)
WRAP, MODE = os.environ["WRAP"], os.environ["MODE"]
EAGER = MODE in ("eager", "deterministic")
WARM_UP = 12 if CUDA else 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.reshape(shape).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, 2)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, labels):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def wrap(net, local):
    how = {} if MODE == "default" else {"mode": MODE}
    if WRAP == "fsdp2":
        for block in net.blocks:
            if not EAGER:
                block.compile(**how)
            fully_shard(block)
        return fully_shard(net)
    net = DistributedDataParallel(net, device_ids=[local] if CUDA else None)
    return net if EAGER else torch.compile(net, **how)


def batches(device):
    torch.manual_seed(1)
    data = TensorDataset(torch.randint(0, WORDS, (512, LENGTH + 1)))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), drop_last=True)
    while True:
        for (ids,) in loader:
            yield ids[:, :-1].to(device), ids[:, 1:].to(device)


def mark():
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first, second):
    return first.elapsed_time(second) if CUDA else 1000 * (second - first)


def wait():
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()
    if CUDA:
        torch.cuda.synchronize()


def take_turns(step):
    """Take as many steps as each line of the benchmark says, and tell it what a step took."""
    losses = [float(step()) for _ in range(WARM_UP)]
    host, port = os.environ["TURNS"].split(":")
    turns = socket.create_connection((host, int(port))).makefile("rw")

    def say(**facts):
        turns.write(json.dumps(facts) + "\n")
        turns.flush()

    say(name=os.environ["NAME"], rank=dist.get_rank(), losses=losses)
    for line in turns:
        count = int(line)
        if not count:
            break
        wait()
        marks = [mark()]
        for _ in range(count):
            loss = step()
            marks.append(mark())
        last = float(loss)
        taken = [between(*pair) for pair in itertools.pairwise(marks)]
        say(ms=statistics.median(taken), loss=last)
    wait()


def main():
    local = int(os.environ["LOCAL_RANK"])
    if CUDA:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.use_deterministic_algorithms(MODE == "deterministic")
    device = torch.device("cuda", local) if CUDA else torch.device("cpu")
    torch.manual_seed(0)
    net = wrap(GPT().to(device, torch.bfloat16 if CUDA else None), local)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    data = batches(device)

    def step():
        if MODE == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = net(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    take_turns(step)
    dist.destroy_process_group()


main()
