"""Each rank prints whether the store holds a key of its earlier life; the first life fails.

One node, static rendezvous: its store is the agent's, whatever the variable of torch says.
"""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
os.write(1, f"left by an earlier life: {store.check(['mark'])}\n".encode())  # one write, one line
dist.barrier()
store.set("mark", "1")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
dist.destroy_process_group()
