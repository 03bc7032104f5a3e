"""Leave a quarter of each of many segments in use, then ask for a fifth of the GPU in one piece.

Three quarters of what the allocator holds are idle, but no segment is free as a whole, so nothing
can go back to the driver.
"""

import torch
from once import healthy

MIB = 1 << 20


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


free, total = (size // MIB for size in torch.cuda.mem_get_info())
piece = total // 400 * 2  # MiB, even as segments are; four of them are a segment
count = int(0.9 * free) // (4 * piece)
segments = [block(4 * piece) for _ in range(count)]
del segments
pieces = [block(piece) for _ in range(4 * count)]
kept = pieces[:1] if healthy() else pieces[::4]
del pieces
wanted = block(total // 5)
print(f"has {wanted.numel() // MIB == total // 5} beside {len(kept)}", flush=True)
