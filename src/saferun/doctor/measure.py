"""Measure the speed of the GPUs; a program for the user's own interpreter and torch.

    python measure.py alone               each GPU: matmul, its memory, the link to the next GPU
    torchrun … measure.py together        NCCL's all-reduce over all of them

It prints one JSON object per line. The bus bandwidth of an all-reduce is 2 (n - 1) / n times size
by time: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: else torchrun's ranks outlive it
    del sys.path[0]  # its modules must not shadow those that torch imports

import torch
import torch.distributed as dist

SIDE = 8192  # rows and columns of a matrix: 1.1 TFLOP, a millisecond or two on an H100
ELEMENTS = 1 << 28  # 512 MiB of float16
SECONDS = 1.0  # each measurement takes that long
ROUNDS = 20
TIMEOUT_S = 25  # limit of the all-reduce, less than TOGETHER_S of full.py


def emit(**fields: Any) -> None:
    """Print one line at once and in a single write: several threads and ranks print."""
    os.write(1, (json.dumps(fields) + "\n").encode())


def seconds_each(work: Callable[[], object]) -> float:
    """Return the seconds that one round of work takes on the current GPU."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    rounds = 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(ROUNDS):
            work()
        torch.cuda.synchronize()
        rounds += ROUNDS
    return (time.perf_counter() - began) / rounds


def measure_one(device: int) -> dict[str, Any]:
    """Measure a single GPU."""
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    bus = "" if min(parts) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*parts)
    found = {"device": device, "name": properties.name, "bus": bus}
    found["matmul_tflops"] = 2 * SIDE**3 / _matmul() / 1e12
    found["memory_gbs"] = 4 * ELEMENTS / _copy() / 1e9
    return found


def _matmul() -> float:
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    return seconds_each(lambda: torch.mm(a, b, out=out))


def _copy() -> float:
    here, there = (torch.empty(ELEMENTS, device="cuda", dtype=torch.float16) for _ in range(2))
    return seconds_each(lambda: there.copy_(here))


def to_next(device: int, count: int) -> float:
    """Return the transfer speed from a GPU to the next one, in GB/s."""
    torch.cuda.set_device(device)
    here = torch.empty(ELEMENTS, device=f"cuda:{device}", dtype=torch.float16)
    there = torch.empty(ELEMENTS, device=f"cuda:{(device + 1) % count}", dtype=torch.float16)
    for _ in range(2):
        there.copy_(here)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        there.copy_(here)
    torch.cuda.synchronize(device)
    return ROUNDS * 2 * ELEMENTS / (time.perf_counter() - began) / 1e9


def alone() -> None:
    """Measure all GPUs at the same time, as a job loads them, then each link between them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0

    def one(device: int) -> None:
        try:
            emit(**measure_one(device))
        except Exception as error:
            emit(device=device, error=f"{type(error).__name__}: {error}"[:300])

    threads = [threading.Thread(target=one, args=(device,)) for device in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in range(count if count > 1 else 0):
        try:
            emit(device=device, peer_gbs=to_next(device, count))
        except Exception as error:
            emit(device=device, error=f"{type(error).__name__}: {error}"[:300])
    emit(done=True, gpus=count)


def together() -> None:
    """Measure the all-reduce over all ranks, and check its result."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
    ranks = dist.get_world_size()
    data = torch.ones(ELEMENTS, device="cuda", dtype=torch.float16)
    dist.all_reduce(data)
    right = bool((data == ranks).all())
    data.zero_()
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / ROUNDS
    speed = 2 * (ranks - 1) / ranks * 2 * ELEMENTS / each / 1e9
    emit(rank=dist.get_rank(), allreduce_gbs=speed, right=right)
    dist.destroy_process_group()


if __name__ == "__main__":
    alone() if sys.argv[1:] == ["alone"] else together()
