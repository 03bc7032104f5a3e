import os

import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

compiled = torch.compile(getattr(flex_attention, os.environ["NAME"]))
q = torch.randn(1, 1, 128, 16)
if compiled.__name__ == "flex_attention":
    compiled(q, q, q)
else:
    compiled(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
print(counters["stats"]["unique_graphs"] > 0)
