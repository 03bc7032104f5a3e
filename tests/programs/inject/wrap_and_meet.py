"""What follows on loaders_and_group.py in programs that look who waits for whom after a wrap."""

import importlib
import os
import pathlib
import sys
import time

from torch.distributed.device_mesh import init_device_mesh  # noqa: F401 - for what follows
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: F401, N817 - used below
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: F401 - for what follows

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

meetings = sys.modules["_saferun.inject.meeting"]
barriers = sys.modules["_saferun.inject.hooks.init.wrap_barrier"]


def old_fully_shard():
    return importlib.import_module("torch.distributed._composable.fsdp.fully_shard").fully_shard


def shard_all(net, mesh, fully_shard=fully_shard):
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(module=net, mesh=mesh)


def slowly(wrap):
    """Rank 1 ends its wrap when rank 0 has wrapped, for which rank 0 must not wait for rank 1."""
    wrapped, inner, second = pathlib.Path("wrapped"), meetings.meet, os.environ["RANK"] == "1"

    def meet(*args, **kwargs):
        end = time.monotonic() + 1
        while second and not wrapped.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if second:
            print(f"rank 0 has wrapped: {wrapped.exists()}", flush=True)
        return inner(*args, **kwargs)

    meetings.meet = meet
    net = wrap()
    wrapped.touch()
    return net
