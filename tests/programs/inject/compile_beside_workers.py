import os

import torch
from torch.utils.data import DataLoader


@torch.compile
def f(x):
    return x.sin() + 1


if __name__ == "__main__":
    for _ in DataLoader(list(range(4)), num_workers=1, multiprocessing_context=os.environ["START"]):
        pass
    f(torch.ones(3))
