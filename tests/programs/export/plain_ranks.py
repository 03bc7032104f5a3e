"""Ranks of a plain script: in the first attempt they do what the first argument says."""

import os
import pathlib
import signal
import sys
import time

rank, attempt = os.environ["RANK"], os.environ.get("SAFERUN_ATTEMPT", "1")
with pathlib.Path("started").open("a", encoding="utf-8") as file:
    file.write(" ".join([attempt, rank, *sys.argv[2:]]) + "\n")


def segv():
    os.kill(os.getpid(), signal.SIGSEGV)


def key():
    raise KeyError("label")


def peer():
    raise RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:7")


def both():  # the loss of a peer follows from a mistake
    sys.stderr.write("[rank0]: KeyError: 'label'\n")
    peer()


def agent():  # torchrun itself dies, and its ranks live on
    if os.fork():
        pathlib.Path(f"agent-{rank}").touch()
        while not (pathlib.Path("agent-0").exists() and pathlib.Path("agent-1").exists()):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    else:
        os.setsid()
    while True:
        signal.pause()


if attempt == "1" and (rank == "1" or sys.argv[1] == "agent"):
    globals()[sys.argv[1]]()
