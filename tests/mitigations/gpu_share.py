"""Take two fifths of the GPU's memory; somebody else may have the rest and more."""

import torch

total = torch.cuda.mem_get_info()[1]
taken = torch.empty(total // 5 * 2, dtype=torch.uint8, device="cuda")
print(f"has {taken.numel() == total // 5 * 2}", flush=True)
