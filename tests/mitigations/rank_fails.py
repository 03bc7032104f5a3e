"""One of the ranks that meet fails in the way that is named, once: rank_fails.py WAY."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from once import first_time

WAY = sys.argv[1]


def read_behind_the_end():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        page[0]


def wait_for_the_end(command=("true",)):
    subprocess.run(command)
    signal.pause()


WAYS = {
    "segfault": lambda: ctypes.string_at(0),
    "bus-error": read_behind_the_end,
    "abort-unknown": os.abort,
    "ended-by-signal": lambda: signal.raise_signal(signal.SIGALRM),
    "killed-from-outside": lambda: wait_for_the_end(("/bin/sh", "-c", f"kill -KILL {os.getpid()}")),
    "nccl-timeout": wait_for_the_end,  # the others wait no longer
    # Somebody asks the launcher to end.
    "sigterm-preempted": lambda: wait_for_the_end(("kill", "-TERM", str(os.getppid()))),
    "sighup-terminal-closed": lambda: wait_for_the_end(("kill", "-HUP", str(os.getppid()))),
}
limit = timedelta(seconds=8) if WAY == "nccl-timeout" else None
dist.init_process_group("gloo", timeout=limit)
if dist.get_rank() == 1 and first_time():
    WAYS[WAY]()
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
os._exit(0)
