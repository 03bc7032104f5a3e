"""The job of step_cost.py: blocks of steps that the GPU bounds and of steps that the host bounds.

The two alternate, a block each, for `--seconds`. The last line is JSON: for each of the two a list
of [the monotonic clock at its begin, wall seconds a step, seconds a step by CUDA events or null].
Without a GPU both run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist

STEPS_A_BLOCK = 10


class Gpu:
    """Steps of large matrix products: the host is far ahead of the GPU."""

    def __init__(self, device: torch.device) -> None:
        size = 8192 if device.type == "cuda" else 256
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.factors = torch.randn(2, size, size, device=device, dtype=kind)
        self.products = 8

    def step(self) -> None:
        """Launch one step."""
        for _ in range(self.products):
            torch.mm(self.factors[0], self.factors[1])


class Host:
    """Steps of small operations with a backward pass: the GPU waits for the host."""

    def __init__(self, device: torch.device) -> None:
        layers = [torch.nn.Linear(64, 64, device=device) for _ in range(24)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, foreach=False)
        self.batch = torch.randn(8, 64, device=device)

    def step(self) -> None:
        """Launch one step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def block(work: Gpu | Host, device: torch.device) -> tuple[float, float | None]:
    """Run one block; return wall and event seconds a step."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(STEPS_A_BLOCK):
            work.step()
        return (time.perf_counter() - begin) / STEPS_A_BLOCK, None
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    first.record()
    for _ in range(STEPS_A_BLOCK):
        work.step()
    last.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / STEPS_A_BLOCK
    return wall, first.elapsed_time(last) / 1000 / STEPS_A_BLOCK


def main() -> None:
    """Run the blocks and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    works = {"gpu": Gpu(device), "host": Host(device)}
    for work in works.values():
        block(work, device)
    times: dict[str, list[tuple[float, float, float | None]]] = {name: [] for name in works}
    begin = time.monotonic()
    number = 0
    while time.monotonic() - begin < seconds:
        for name, work in works.items():
            times[name].append((time.monotonic(), *block(work, device)))
        number += STEPS_A_BLOCK
        print(f"step {number} loss 0.5", flush=True)
    print(json.dumps(times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
