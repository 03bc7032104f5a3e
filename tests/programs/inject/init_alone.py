"""Rank 1 ends without a group, when rank 0 has waited a second for it."""

import os
import pathlib
import time
from datetime import timedelta

import torch.distributed as dist

flag, end = pathlib.Path("alone"), time.monotonic() + 60
if os.environ["RANK"] == "1":
    while not flag.exists() and time.monotonic() < end:
        time.sleep(0.01)
    raise SystemExit
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
except dist.DistStoreError:
    flag.touch()
    print("alone", flush=True)
