"""Print what a rank has of its surroundings; with an argument, it then meets the others."""

import os
import sys

facts = {
    "hooks": "_saferun.inject" in sys.modules,
    "other": getattr(sys, "other_was_here", False),
    "followed": "followed" in sys._xoptions,
    "attempt": os.environ.get("SAFERUN_ATTEMPT"),
}
line = " ".join(f"{name}={value}" for name, value in facts.items())
os.write(1, f"{line}\n".encode())  # in one piece: torchrun gives its ranks -u
if sys.argv[1:] == ["fail"]:
    raise ValueError("planted")
if sys.argv[1:]:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    os.write(1, b"met\n")
