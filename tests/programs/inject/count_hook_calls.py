"""Count the calls of functions of saferun's in the steps of a training: WRAP is ddp or fsdp2.

MODE is eager or a backend of torch.compile. Prints the names that were called in ten steps after
the first fifty, with their numbers, as JSON.
"""

import collections
import json
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OURS = f"{os.sep}saferun{os.sep}inject{os.sep}"
WIDTH, WORDS = 8, 16
calls = collections.Counter()


def count(frame, event, _):
    if event == "call" and OURS in frame.f_code.co_filename:
        calls[frame.f_code.co_name] += 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.table(ids)), ids)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
net = fully_shard(net) if os.environ["WRAP"] == "fsdp2" else DistributedDataParallel(net)
if os.environ["MODE"] != "eager":
    net = torch.compile(net, backend=os.environ["MODE"])
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
data = TensorDataset(torch.arange(960) % WORDS)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
step = 0
while step < 60:
    for (ids,) in loader:
        if step == 50:
            threading.setprofile(count)
            sys.setprofile(count)
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    sampler.set_epoch(step)
sys.setprofile(None)
threading.setprofile(None)
if dist.get_rank() == 0:
    print(json.dumps(calls))
dist.barrier()
