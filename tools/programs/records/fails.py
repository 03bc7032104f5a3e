"""A small training that fails in the way that its argument names; two ranks or one."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path(tempfile.gettempdir())


class Records(Dataset[torch.Tensor]):
    """Items of which one fails where a loader's worker asks for it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and self.how == "raise":
            return torch.tensor({}["pixel_values"])
        if index == 5:
            os.kill(os.getpid(), getattr(signal, self.how))
        return torch.ones(4)


class Branches(nn.Module):
    """A model of which one part takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Twice(nn.Module):
    """A model whose checkpointed layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def train(steps: int = 3, first: int = 1) -> None:
    """Make a few steps, all ranks together."""
    for step in range(first, first + steps):
        total = torch.ones(1)
        if dist.is_initialized():
            dist.all_reduce(total)
        if RANK == 0:
            print(f"step {step} loss {3.0 / step:.4f}", flush=True)


def one_rank(signal_or_error: int | BaseException) -> None:
    """Have rank 1 fail while the others go on."""
    if RANK == 1:
        if isinstance(signal_or_error, BaseException):
            raise signal_or_error
        os.kill(os.getpid(), signal_or_error)
    train(20, first=4)


def load(how: str) -> None:
    """Read items in workers."""
    for batch in DataLoader(Records(how), batch_size=1, num_workers=2):
        batch.sum()


def step_of(model: nn.Module, find_unused: bool = False) -> None:
    """Train a model for two steps."""
    wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
    for _ in range(2):
        wrapped(torch.ones(2, 4, requires_grad=True)).sum().backward()


def damaged_checkpoint(kind: str) -> None:
    """Load weights from a file that is cut short."""
    path = FOLDER / f"model-{RANK}.{kind}"
    if kind == "safetensors":
        from safetensors.torch import load_file, save_file

        save_file({"w": torch.ones(1000)}, path)
        path.write_bytes(path.read_bytes()[:-100])
        load_file(path)
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    torch.load(path)


def other_shapes() -> None:
    """Load the weights of another model."""
    nn.Linear(4, 3).load_state_dict(nn.Linear(4, 4).state_dict())


def nan() -> None:
    """Make the loss NaN and have torch look for the place."""
    torch.autograd.set_detect_anomaly(True)
    x = torch.zeros(2, requires_grad=True)
    (torch.sqrt(x) * 0).sum().backward()


def different_shapes() -> None:
    """Reduce tensors whose shapes differ, with the check that names them."""
    dist.destroy_process_group()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2 + RANK))


def slow_rank(what: str) -> None:
    """Have rank 1 do something else for longer than the others wait."""
    group = dist.new_group(timeout=timedelta(seconds=6))
    if RANK == 1:
        print(what, file=sys.stderr, flush=True)
        time.sleep(15)
    if what:
        dist.monitored_barrier(group, timeout=timedelta(seconds=6))
    dist.all_reduce(torch.ones(1), group=group)


def own_port() -> None:
    """Meet at a port of the script's own, which somebody else has."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        url = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=2)


def no_launcher() -> None:
    """Start without a launcher's variables."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo")


def someone_else() -> None:
    """Write where this user may not."""
    os.setuid(65534)
    Path("/etc/train.log").write_text("", encoding="utf-8")


def little_memory() -> None:
    """Ask for more memory than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    torch.ones(1 << 33)


def little_memory_python() -> None:
    """The same with Python's own objects."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    _ = bytearray(1 << 34)


def crash() -> None:
    """Read address 0, with Python's report of it."""
    faulthandler.enable()
    if RANK == 1:
        ctypes.string_at(0)
    train(20, first=4)


def unknown_hub() -> None:
    """Fetch a model from a server whose name nobody knows."""
    from huggingface_hub import hf_hub_download

    hf_hub_download("a/b", "config.json", endpoint="https://hub.invalid")


WAYS = {
    "key-error": lambda: one_rank(KeyError("input_ids")),
    "all-ranks": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "sigkill": lambda: one_rank(signal.SIGKILL),
    "sigill": lambda: one_rank(signal.SIGILL),
    "sigfpe": lambda: one_rank(signal.SIGFPE),
    "crash": crash,
    "exit": lambda: one_rank(SystemExit(3)),
    "import": lambda: __import__("flash_attn_of_nowhere"),
    "missing-file": lambda: Path("/data/nowhere/train.bin").read_bytes(),
    "permission": someone_else,
    "arguments": lambda: __import__("argparse").ArgumentParser().parse_args(["--lr", "1"]),
    "worker-raises": lambda: load("raise"),
    "worker-killed": lambda: load("SIGKILL"),
    "worker-crashes": lambda: load("SIGSEGV"),
    "damaged-pt": lambda: damaged_checkpoint("pt"),
    "damaged-safetensors": lambda: damaged_checkpoint("safetensors"),
    "other-shapes": other_shapes,
    "nan": nan,
    "loss-is-nan": lambda: sys.exit("Loss is nan, stopping training"),
    "different-shapes": different_shapes,
    "slow-rank": lambda: slow_rank(""),
    "slow-data": lambda: slow_rank("Running tokenizer on dataset:  12%|#2        | 12/100"),
    "twice": lambda: dist.init_process_group("gloo"),
    "no-group": lambda: (dist.destroy_process_group(), dist.get_rank(), dist.barrier()),
    "no-launcher": no_launcher,
    "own-port": own_port,
    "unused": lambda: step_of(Branches()),
    "ready-twice": lambda: step_of(Twice(), find_unused=True),
    "no-gradients": lambda: DistributedDataParallel(nn.Identity()),
    "memory": little_memory,
    "memory-python": little_memory_python,
    "no-cuda": lambda: torch.ones(1).cuda(),
    "nccl-without-gpu": lambda: dist.new_group(backend="nccl"),
    "hub": unknown_hub,
    "interrupted": lambda: one_rank(KeyboardInterrupt()),
}


def main() -> None:
    how = sys.argv[1]
    if "RANK" in os.environ and how not in ("no-launcher", "own-port"):
        dist.init_process_group("gloo")
    train()
    WAYS[how]()


if __name__ == "__main__":
    main()
