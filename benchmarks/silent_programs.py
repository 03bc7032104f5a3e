"""Programs whose ordinary behaviour is silent, and some that hang.

`silent_programs.py NAME S PATH`: each is silent for S seconds; `silences.py` starts them. PATH is a
named pipe, into which that script writes slowly, or the port of a server that reads what comes.
As rank 0 of two, rank 1 waits for it in a barrier.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

NAME, SECONDS, PATH = sys.argv[1], float(sys.argv[2]), sys.argv[3]
BEGAN = time.monotonic()


def lasts() -> bool:
    return time.monotonic() - BEGAN < SECONDS


def compute() -> None:
    while lasts():
        sum(range(100_000))


def compile_model() -> None:
    import torch

    layers = 4
    while lasts():
        torch.compiler.reset()
        layers += 1
        wide = [
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(layers)
        ]
        torch.compile(torch.nn.Sequential(*wide))(torch.ones(2, 64)).sum().backward()


def evaluate() -> None:
    import torch

    model = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True).eval()
    with torch.no_grad():
        while lasts():
            model(torch.ones(4, 64, 256))


def one_call_in_c() -> None:
    import numpy as np

    data = np.random.default_rng(0).standard_normal((1400, 1400))
    while lasts():  # each call takes seconds, as a fit of sklearn takes minutes
        np.linalg.svd(data)


def save_checkpoint() -> None:
    with tempfile.TemporaryFile() as file:
        while lasts():
            file.write(bytes(1 << 20))
            file.flush()
            time.sleep(1)


def upload(rate: int) -> None:
    with socket.create_connection(("127.0.0.1", int(PATH))) as link:
        chunk = bytes(rate // 10)
        while lasts():
            link.sendall(chunk)
            threading.Event().wait(0.1)


def load_checkpoint() -> None:
    with open(PATH, "rb") as file:
        while lasts() and file.read(1 << 20):
            pass


def import_modules() -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    at = 0
    while lasts():
        at += 1
        (folder / f"module_{at}.py").write_text(f"x = {list(range(1000))}")
        __import__(f"module_{at}")
        threading.Event().wait(0.5)  # the file system is slow


def prepare(work: Callable[[], None]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        work()
    dist.barrier()
    dist.destroy_process_group()


def in_a_program(command: str) -> None:
    subprocess.run(["timeout", str(SECONDS), "sh", "-c", command], check=False, capture_output=True)


def wait_for(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=False)


def load_batches() -> None:
    import torch

    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, at: int) -> int:
            compute()
            return at

    for _ in torch.utils.data.DataLoader(Slow(), num_workers=2):
        pass


def map_rows() -> None:
    import multiprocessing

    with multiprocessing.Pool(2) as pool:
        pool.map(write_rows, range(2))


def write_rows(_: int) -> None:
    with tempfile.TemporaryFile() as file:
        while lasts():
            file.write(str(sum(range(1_000_000))).encode())
            file.flush()


def show_bar() -> None:
    from tqdm import tqdm

    for _ in tqdm(range(10**9), disable=None):  # silent where stderr is no terminal
        sum(range(100_000))
        if not lasts():
            break


def poll_for_file() -> None:
    while lasts() and not os.path.exists("/nonexistent/ready"):
        time.sleep(10 * SECONDS / 2400)


def hang_on_lock() -> None:
    with contextlib.suppress(queue.Empty):
        queue.Queue[int]().get(timeout=SECONDS)


ORDINARY: dict[str, Callable[[], None]] = {
    "torch.compile of ever larger models": compile_model,
    "evaluation": evaluate,
    "one long call of numpy after another": one_call_in_c,
    "a search in Python": compute,
    "checkpoint written slowly": save_checkpoint,
    "upload from memory, 8 MiB/s": lambda: upload(8 << 20),
    "upload from memory, 128 KiB/s": lambda: upload(128 << 10),
    "checkpoint read from a slow disk": load_checkpoint,
    "imports from a slow disk": import_modules,
    "rank 0 writes data, rank 1 in a barrier": lambda: prepare(save_checkpoint),
    "rank 0 computes, rank 1 in a barrier": lambda: prepare(compute),
    "tokenising in another program": lambda: in_a_program("while :; do :; done"),
    "a compiler as another program": lambda: in_a_program(
        "while :; do seq 3000 | sed 's/.*/int x&(int a){return a*&;}/' |"
        " cc -O2 -xc -c -o /dev/null -; done"
    ),
    "a copy by another program": lambda: in_a_program(f"cat {PATH}"),
    "waiting for another program": lambda: wait_for(f"sleep {SECONDS}"),
    "the output of another program": lambda: in_a_program(f"sleep {SECONDS}"),
    "workers of a DataLoader compute": load_batches,
    "a pool of processes maps rows": map_rows,
    "a progress bar for terminals only": show_bar,
    "polling for a file": poll_for_file,
    "one long sleep": lambda: time.sleep(SECONDS),
    "a person at a breakpoint": lambda: print(input("(Pdb) ")),
    "stopped with all its processes": compute,
}
HANGS: dict[str, Callable[[], None]] = {
    "hang: a lock": hang_on_lock,
    "hang: a named pipe": lambda: print(pathlib.Path(PATH).read_text()),
    "hang: a missing peer": lambda: prepare(hang_on_lock),
    "hang: an endless loop": compute,
}

if __name__ == "__main__":
    deed = {**ORDINARY, **HANGS}[NAME]
    apart = os.environ.get("WORLD_SIZE", "1") == "1" or any(s in NAME for s in ("barrier", "peer"))
    deed() if apart else prepare(deed)
