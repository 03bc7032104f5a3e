"""The least that one import for all ranks costs: torchrun in a process that has imported torch.

    python benchmarks/start_prototype.py IMPORTS --standalone --nproc-per-node=N SCRIPT [ARG ...]

Forks a waiting child for each rank before torchrun makes threads, and gives it the arguments and
variables with which torchrun would start the rank. Nothing else: no fallback, no check, none of
what a program may look at. It is the mark beside which benchmarks/start.py sets warm ranks.
"""

import os
import pickle
import runpy
import subprocess
import sys
import threading

import torch  # noqa: F401 - before the fork, once for all ranks
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

waiting: list[tuple[int, int]] = []  # pid, the pipe on which it waits


def become_rank(reader: int) -> None:
    """Run the script that is sent as a rank of it."""
    with os.fdopen(reader, "rb") as pipe:
        words, environ = pickle.load(pipe)
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = list(words[2:])  # behind the interpreter and -u
    runpy.run_path(sys.argv[0], run_name="__main__")


def fork_rank() -> None:
    """Fork one child that waits."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        for _, other in waiting:
            os.close(other)
        become_rank(reader)
        sys.exit()
    os.close(reader)
    waiting.append((pid, writer))


def start_rank(_: SubprocessHandler, words: tuple[str, ...], environ: dict[str, str]) -> object:
    """Give a waiting child its rank, in place of starting a process."""
    pid, writer = waiting.pop(0)
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump((words, environ), pipe)
    process = subprocess.Popen.__new__(subprocess.Popen)
    state = {"pid": pid, "returncode": None, "args": words, "_waitpid_lock": threading.Lock()}
    vars(process).update(state, stdin=None, stdout=None, stderr=None, _child_created=True)
    return process


if __name__ == "__main__":
    exec(sys.argv[1])  # what the script imports
    option = next(word for word in sys.argv if word.startswith("--nproc-per-node="))
    for _ in range(int(option.partition("=")[2])):
        fork_rank()
    SubprocessHandler._popen = start_rank
    run.main(sys.argv[2:])
