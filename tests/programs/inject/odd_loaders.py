"""Train on the data of the CASE, and print what came of it."""

import os
import subprocess
import sys
import traceback

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, dataloader

CASE = os.environ["CASE"]
HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Odd:
    """A batch whose methods all raise."""

    def __init__(self, rows):
        self.__dict__["rows"] = rows

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __iter__(self):
        raise RuntimeError("iter")

    def __len__(self):
        raise RuntimeError("len")


class Raises(DataLoader):
    def __iter__(self):
        raise ValueError("no data today")


class Rows(IterableDataset):
    def __iter__(self):
        for n in range(40):
            if n == 9:
                raise KeyError(f"row {n}")
            yield torch.full((4,), float(n))


def begin():
    """Make the group; return what ends its store, or None."""
    if CASE != "store_went_away":
        dist.init_process_group("gloo")
        return None
    rank, first = int(os.environ["RANK"]), None
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        first = subprocess.Popen([sys.executable, "-c", HOST], **pipes)
        agents.set("port", first.stdout.readline())
    port = int(agents.get("port"))
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.zeros(1))  # all connections are there
    return first


def loader_of(rank):
    data = TensorDataset(torch.randn(160, 4, generator=torch.Generator().manual_seed(3)))
    if CASE == "odd_batches":
        return DataLoader(data, 4, collate_fn=lambda rows: Odd(torch.stack([x for (x,) in rows])))
    if CASE == "batches_of_generators":
        return DataLoader(data, 4, collate_fn=lambda rows: (x for (x,) in rows))
    if CASE == "iter_raises":
        return Raises(data, 4)
    if CASE == "generator_raises":
        return DataLoader(Rows(), None)
    if CASE == "one_batch_on_a_rank":
        return DataLoader(data, 4 if rank else 160)
    return DataLoader(data, 4)


seen = []


def patch():
    """Count the batches by a function of this script's own in the place of torch's."""
    original = dataloader._BaseDataLoaderIter.__next__

    def counting(iterator):
        batch = original(iterator)
        seen.append(1)
        return batch

    dataloader._BaseDataLoaderIter.__next__ = counting


def main():
    server = begin()
    rank = dist.get_rank()
    if CASE == "patched_before":
        patch()
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    count = 0
    for batch in loader_of(rank):
        if count == 1 and CASE == "patched_meanwhile":
            seen.append(1)  # the one before
            seen.append(1)  # this one
            patch()
        if count == 1 and server is not None:
            server.kill()
            server.wait()
        if CASE == "store_went_away" and count == 1:
            dist.all_reduce(torch.zeros(1))  # it is gone for both
        rows = batch.rows if CASE == "odd_batches" else None
        if rows is None:
            rows = torch.stack(list(batch)) if CASE == "batches_of_generators" else batch
        rows = rows[0] if isinstance(rows, (list, tuple)) else rows
        optimizer.zero_grad()
        net(rows.reshape(-1, 4)).sum().backward()
        optimizer.step()
        count += 1
    if CASE.startswith("patched"):
        return f"{len(seen)} seen"
    return "1 or 40 batches" if CASE == "one_batch_on_a_rank" else f"{count} batches"


try:
    said = main()
except Exception as error:
    said = f"{type(error).__name__}: {error}"
    ours = os.path.dirname(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    if f'"{ours}/' in "".join(traceback.format_exception(error)[1:-1]):
        said += ", with a frame of saferun's"
print(said, flush=True)
if CASE != "store_went_away":
    dist.barrier()
