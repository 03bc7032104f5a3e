"""Do the FAULT, an index that is not there; where CAUGHT, print the error and use the GPU again.

Where COMPILED, the function that does it is compiled.
"""

import json
import os

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

ids = torch.arange(8, device="cuda") + 5
logits, table = torch.randn(8, 10, device="cuda"), torch.nn.Embedding(10, 4, device="cuda")
caught = IndexError if os.environ["CAUGHT"] else KeyError


def step(ids):
    if os.environ["FAULT"] == "label":
        return F.cross_entropy(logits, ids)
    return table(ids).sum()


if os.environ.get("COMPILED"):
    step = torch.compile(step)
try:
    step(ids % 13)
    torch.cuda.synchronize()
except caught as error:
    print(json.dumps({"error": str(error), "after": float(torch.ones(2, device="cuda").sum())}))
