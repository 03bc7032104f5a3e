"""Three ranks of gloo that wait for rank 0, which does as it is told: `stalling.py FOLDER WHAT …`.

Each WHAT is done in a step of its own of the first attempt, until `FOLDER/<number>` is there.
"""

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from strike import attempt_in

STEPS = 15  # between two of them: enough for the watch to see that the job goes on
folder = Path(sys.argv[1])


def evaluate(done: Path) -> None:
    while not done.exists():
        sum(range(100_000))


def take_lock(done: Path) -> None:
    """Wait for what another thread would have to give, without a sign of work."""
    given = threading.Event()
    thread = threading.Thread(target=lambda: (_wait(done), given.set()), daemon=True)
    thread.start()
    given.wait()


def _wait(done: Path) -> None:
    os.mkfifo(fifo := f"{done}.fifo")
    with open(fifo, encoding="utf-8"):
        pass


def sleep(done: Path) -> None:
    while not done.exists():
        time.sleep(0.5)


def stop(done: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(done: Path) -> None:
    os._exit(0)


def loop_for_ever(done: Path) -> None:
    while True:
        pass


DEEDS = {f.__name__: f for f in (evaluate, take_lock, sleep, stop, leave, loop_for_ever)}

limit_s = float(os.environ.get("GROUP_LIMIT_S", "1800"))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit_s))
one = torch.ones(1)
for step in range(STEPS * len(sys.argv[1:])):
    at = step // STEPS
    is_due = step % STEPS == STEPS - 1 and at < len(sys.argv[2:]) and attempt_in("1")
    if is_due and dist.get_rank() == 0:
        DEEDS[sys.argv[2 + at]](folder / str(at))
    dist.all_reduce(one)
    if dist.get_rank() == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.2)
dist.destroy_process_group()
