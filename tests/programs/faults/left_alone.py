"""Three ranks, of which rank 0 leaves with status 0, and which record as NCCL's do: `STATE FILE`.

Each serves torch's pipe for its flight recorder, whose last call has the state. The others wait
for rank 0 in the store: gloo's own connections would tell them that it is gone. Its pid is in FILE.
"""

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def serve(rank: int) -> None:
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
    os.mkfifo(pipe)
    entry = {
        **{"record_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1},
        **{"profiling_name": "nccl:all_reduce", "input_sizes": [[1]], "state": sys.argv[1]},
    }
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    content = pickle.dumps({"entries": [entry], "pg_config": config}, protocol=2)
    name = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}"
    with open(pipe, "r+b", buffering=0) as asked:
        while asked.read(1):
            with open(f"{name}.new", "wb") as file:
                file.write(content)
            os.replace(f"{name}.new", name)


dist.init_process_group("gloo")
rank = dist.get_rank()
threading.Thread(target=serve, args=[rank], daemon=True).start()
one = torch.ones(1)
for step in range(10):
    dist.all_reduce(one)
    if rank == 1:
        print(f"step {step}", flush=True)
    time.sleep(0.2)
if rank == 0:
    Path(sys.argv[2]).write_text(str(os.getpid()), encoding="utf-8")
    os._exit(0)
dist.new_group([0, 1, 2])
