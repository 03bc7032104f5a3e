"""Two ranks of gloo that hang at the third step, in the first attempt: `hanging_rank.py FAULT …`.

The rank that is elsewhere is 1; with `input` it is 0.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from strike import attempt_in

_lock = threading.Lock()


def loop_for_ever() -> None:
    while True:
        pass


def other_collective() -> None:
    dist.barrier()


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_file() -> None:
    Path(sys.argv[2]).read_text(encoding="utf-8")


def leave_early() -> None:
    os._exit(0)


class NeedsLock(torch.utils.data.Dataset):
    """Takes a lock that another thread of the rank held when the worker was forked."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> int:
        with _lock:
            return at


class Dies(NeedsLock):
    def __getitem__(self, at: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return at


def forked_worker() -> None:
    taken = threading.Event()
    threading.Thread(
        target=lambda: (_lock.acquire(), taken.set(), time.sleep(9e5)), daemon=True
    ).start()
    taken.wait()
    for _ in torch.utils.data.DataLoader(NeedsLock(), num_workers=1):
        pass


def dead_worker() -> None:
    for _ in torch.utils.data.DataLoader(Dies(), num_workers=1):
        pass


def compile_worker() -> None:
    from torch._inductor.async_compile import AsyncCompile

    pool = AsyncCompile.process_pool()
    pool.submit(os.getpid).result()
    begun = pool.submit(time.sleep, 9e5)
    time.sleep(1)  # until a worker has taken it; there is no way to ask
    os.kill(pool.process.pid, signal.SIGKILL)
    begun.result()


def ask() -> None:
    input("go on? ")


def recompile_for_ever() -> None:
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**9

    @torch.compile(backend="eager", dynamic=False)
    def double(one: torch.Tensor, times: int) -> torch.Tensor:
        return one * times

    times = 0
    while True:
        times += 1
        double(torch.ones(2), times)


FAULTS = {
    "loop": loop_for_ever,
    "mismatch": other_collective,
    "stop": stopped,
    "file": read_file,
    "early": leave_early,
    "forked-worker": forked_worker,
    "dead-worker": dead_worker,
    "compile-worker": compile_worker,
    "input": ask,
    "recompile": recompile_for_ever,
}

if __name__ == "__main__":
    fault = sys.argv[1]
    struck = int(fault != "input")
    dist.init_process_group("gloo")
    one = torch.ones(1)
    for step in range(5):
        if step == 3 and attempt_in("1"):
            if dist.get_rank() == struck:
                FAULTS[fault]()
            elif fault == "early":
                dist.new_group([0, 1])
        dist.all_reduce(one)
        print(f"step {step}", flush=True)
    dist.destroy_process_group()
