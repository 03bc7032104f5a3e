"""Keep more than the GPU has."""

import torch

kept = []
while True:
    kept.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))
