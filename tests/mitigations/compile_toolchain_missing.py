"""Compile one function and tell the sum; there may be no C++ compiler."""

import torch


@torch.compile
def wave(x):
    return (x.sin() ** 2 + x.cos() ** 2).sum()


print(f"sum {float(wave(torch.ones(64))):.0f}", flush=True)
