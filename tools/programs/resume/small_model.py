"""What the trainers beside this file have in common: a small model whose checkpoints take a while.

Most of its parameters are an embedding, so that a step is quick and a checkpoint has megabytes. The
data of a step depends on its number alone, and dropout on the random state that a trainer saves.
"""

import hashlib
import time

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 8_000, 64, 8
STEP_S = 0.03  # the least that a step takes: a run is to last a while, and use little CPU


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, 16)
        self.dropout = dropout

    def forward(self, x, labels):
        hidden = functional.dropout(self.embedding(x).mean(1), self.dropout, self.training)
        loss = functional.cross_entropy(self.head(hidden), labels)
        return {"loss": loss}


class Data(torch.utils.data.Dataset):
    """So many examples; each follows from its number."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        x = torch.randint(WORDS, (LENGTH,), generator=made)
        return {"x": x, "labels": x.sum() % 16}


def batch(step, rank, size=4):
    """Return the examples of a step on a rank."""
    data = Data(1 << 30)
    found = [data[(step * 64 + rank) * size + index] for index in range(size)]
    return {name: torch.stack([one[name] for one in found]) for name in ("x", "labels")}


class Pace:
    """Sleeps what is left of a step."""

    def __init__(self):
        self.due = time.monotonic()

    def wait(self):
        self.due = max(self.due + STEP_S, time.monotonic())
        time.sleep(max(0.0, self.due - time.monotonic()))


def report(model, loss):
    """Print what a run has come to: it must be the same however often it was killed."""
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        content.update(tensor.detach().numpy().tobytes())
    print(f"final loss {float(loss):.8f} weights {content.hexdigest()[:16]}", flush=True)
