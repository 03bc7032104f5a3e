"""Keep what a DataLoader's worker sent: each shared tensor holds a descriptor."""

import torch
from torch.utils.data import DataLoader

kept = list(DataLoader(torch.arange(400), batch_size=1, num_workers=1))
print(f"kept {len(kept)} batches", flush=True)
