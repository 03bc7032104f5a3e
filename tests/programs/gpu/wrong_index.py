"""Do the FAULT, an index that is not there; where CAUGHT, print the error and use the GPU again."""

import json
import os

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

ids = torch.arange(8, device="cuda") + 5
caught = IndexError if os.environ["CAUGHT"] else KeyError
try:
    if os.environ["FAULT"] == "label":
        loss = F.cross_entropy(torch.randn(8, 10, device="cuda"), ids % 13)
    else:
        loss = torch.nn.Embedding(10, 4, device="cuda")(ids % 13).sum()
    torch.cuda.synchronize()
except caught as error:
    print(json.dumps({"error": str(error), "after": float(torch.ones(2, device="cuda").sum())}))
