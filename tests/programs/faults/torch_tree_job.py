"""A training as jobs are, small: its ranks are struck while they run, and it goes on where it was.

    torch_tree_job.py FOLDER STEPS ERROR_STEP cpu|cuda

A rank has DDP over gloo or NCCL, two DataLoader workers, a compiled function (eager where there is
no C++ compiler for inductor) and a checkpoint each tenth step; rank 0 a detached helper, too. Each
step writes a line to stdout and one to stderr, numbered from 1 in each attempt. In FOLDER
`count-ATTEMPT-RANK` counts them and `pids-ATTEMPT-RANK` names the processes: the rank from its
first moment, the others once they are there. The last line is `done STEPS TOTAL`, where TOTAL is
the sum of all data, each seen once. ERROR_STEP, if not 0, has a mistake of the script's own.
"""

import faulthandler
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, steps, error_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
cuda = sys.argv[4] == "cuda"
attempt, rank = os.environ["SAFERUN_ATTEMPT"], int(os.environ["RANK"])
faulthandler.register(signal.SIGRTMIN + 5, all_threads=True)  # for who looks at a hang


def report(*names: str) -> None:
    """Name this rank's processes in FOLDER."""
    path = folder / f"pids-{attempt}-{rank}"
    path.with_suffix(".new").write_text(
        "\n".join([f"rank {os.getpid()}", *names]), encoding="utf-8"
    )
    path.with_suffix(".new").rename(path)


report()
if not cuda:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402 - the rank is known before, and its GPUs are chosen
import torch._inductor.config as inductor  # noqa: E402 - as above
import torch.distributed as dist  # noqa: E402 - as above
from torch import nn  # noqa: E402 - as above
from torch.nn.parallel import DistributedDataParallel  # noqa: E402 - as above
from torch.utils.data import DataLoader, Dataset  # noqa: E402 - as above

BATCH = 4
CHECKPOINT = folder / "checkpoint.pt"
COMPILER = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
# They lie in TMPDIR, are compiled for half a minute, and their path is in the key of each kernel.
inductor.cpp_cache_precompile_headers = False


class Numbers(Dataset):
    """Sample i is eight times i."""

    def __getitem__(self, index):
        return torch.full((8,), float(index))

    def __len__(self):
        return steps * dist.get_world_size() * BATCH


@torch.compile(backend="inductor" if COMPILER else "aot_eager")
def error(output, target):
    return (torch.sin(output) - target).square().mean()


def helper() -> int:
    """Start a process that detaches itself; return its pid."""
    reported, tell = os.pipe()
    code = "import os, signal; os.write({}, str(os.getpid()).encode()); signal.pause()"
    command = ["setsid", "-f", sys.executable, "-S", "-c", code.format(tell)]
    null = subprocess.DEVNULL
    subprocess.run(command, stdin=null, stdout=null, stderr=null, pass_fds=[tell], check=True)
    pid = int(os.read(reported, 20))
    os.close(reported)
    os.close(tell)
    return pid


def save(step, total, model, optimizer):
    """Write a checkpoint: the old one or the new one is there, whenever this is interrupted."""
    state = {"step": step, "total": total, "model": model, "optimizer": optimizer}
    torch.save(state, CHECKPOINT.with_suffix(".new"))
    CHECKPOINT.with_suffix(".new").rename(CHECKPOINT)


def counter():
    with open(folder / f"count-{attempt}-{rank}", "w+b") as file:
        file.truncate(8)
        return mmap.mmap(file.fileno(), 8)


def begin():
    """Return the device, model and optimizer, how many steps were made, and the sum so far."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    raw = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)
    first, total = 0, torch.zeros((), dtype=torch.float64, device=device)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device)
        first, total = state["step"], state["total"]
        raw.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return device, raw, optimizer, first, total


def batches(first):
    """Return what yields this rank's batches; its workers, and the helper, are reported."""
    size = dist.get_world_size()
    starts = (((step * size) + rank) * BATCH for step in range(first, steps))
    wanted = [list(range(start, start + BATCH)) for start in starts]
    data = iter(DataLoader(Numbers(), batch_sampler=wanted, num_workers=2, pin_memory=cuda))
    names = [f"data {worker.pid}" for worker in data._workers]
    report(*names, *([f"helper {helper()}"] if rank == 0 else []))
    return data


def train():
    device, raw, optimizer, first, total = begin()
    model = DistributedDataParallel(raw, [device.index] if cuda else None)
    data = batches(first)
    count = counter()
    for step in range(first + 1, steps + 1):
        batch = next(data).to(device)
        loss = error(model(batch / 1e5), batch / 1e5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        part = batch[:, 0].double().sum()
        dist.all_reduce(part)
        total += part
        for fd, name in ((1, "out"), (2, "err")):
            os.write(fd, f"{name} {attempt} {rank} {step - first}\n".encode())
        count[:] = (step - first).to_bytes(8, "little")
        if step == error_step:
            raise ValueError("size mismatch in the user's own code")
        if rank == 0 and step % 10 == 0:
            save(step, total, raw.state_dict(), optimizer.state_dict())
        time.sleep(0.01)
    if rank == 0:
        os.write(1, f"done {steps} {int(total)}\n".encode())
    dist.barrier()
    time.sleep(0.5)  # gloo resets the connection of a rank that is in its last collective


train()
gc.collect()  # DDP holds the group: gloo's threads end before the interpreter (pytorch#190489)
dist.destroy_process_group()
