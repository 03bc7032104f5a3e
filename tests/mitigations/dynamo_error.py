"""Two compiled functions: the backend of one cannot compile it, the other's can."""

import torch
from once import healthy

compiled = []


def broken(graph, inputs):
    raise ValueError("this backend has no rule for sin")


def working(graph, inputs):
    compiled.append("cosine")
    return graph.forward


@torch.compile(backend=working)
def cosine(x):
    return x.cos()


@torch.compile(backend=working if healthy() else broken)
def sine(x):
    return x.sin()


total = cosine(torch.ones(4)) ** 2 + sine(torch.ones(4)) ** 2
print(f"sum {float(total.sum()):.0f}, compiled {compiled}", flush=True)
