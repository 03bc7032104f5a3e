"""The head of programs that show what inductor's settings are where it lowers a graph."""

import json
import sys

import torch
import torch._inductor.config as config
from torch._inductor.graph import GraphLowering

KEYS = ["max_autotune", "max_autotune_gemm", "max_autotune_pointwise"]
KEYS += ["coordinate_descent_tuning", "triton.autotune_pointwise", "triton.cudagraphs"]
ALL = dict.fromkeys(KEYS, True)
lowered = []
original = GraphLowering.run


def run(self, *args):
    values = config.get_config_copy()
    callers = sys._getframe(1).f_locals.get("is_backward")  # torch 2.4's graph does not know it
    backward = bool(getattr(self, "is_backward", callers))
    lowered.append(dict({k: values[k] for k in KEYS}, backward=backward))
    return original(self, *args)


def show(found):
    print(json.dumps(found))


GraphLowering.run = run
weight = torch.randn(8, 8)


def body(x):
    return x @ weight  # nothing that inductor must generate C++ for: that costs seconds


x = torch.randn(8, 8, requires_grad=True)
dx = torch.ones(8, 8)
