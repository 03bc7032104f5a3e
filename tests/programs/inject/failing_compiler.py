"""Compile while the compiler fails for the direction that BACKWARD says."""

import os
import sys

import torch
import torch._dynamo.config
from torch._inductor.graph import GraphLowering

original = GraphLowering.run


def run(self, *args):
    callers = sys._getframe(1).f_locals.get("is_backward")  # torch 2.4's graph does not know it
    if bool(getattr(self, "is_backward", callers)) is (os.environ["BACKWARD"] == "True"):
        raise RuntimeError("the compiler fails")
    return original(self, *args)


GraphLowering.run = run
torch._dynamo.config.suppress_errors = False
x = torch.randn(4, 4, requires_grad=True)
weight = torch.randn(4, 4)
full = os.environ["FULL"] == "True"
torch.compile(lambda x: x @ weight, fullgraph=full)(x).backward(torch.ones(4, 4))
print(x.grad is not None)
