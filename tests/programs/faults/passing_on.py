"""Four chains of processes, each of which forks the next one and exits at once; then the job ends.

    passing_on.py WAY DEVICE

WAY is what a chain does with the device: "inherited" (each generation has it from the last one),
"reopened" (each opens it anew), "apart" (each is a session of its own, too), "none" (left alone).
A chain that was let to its end, at ROSTER.stop, enters the roster as "outlived".
"""

import os
import signal
import sys
import time
from pathlib import Path

from roster import ROSTER, join, stay, wait_for

LIMIT_S = 90  # where nobody makes ROSTER.stop

way, device = sys.argv[1:]
began = time.monotonic()


def hold(held):
    if way == "reopened":
        os.close(held)
    if way == "apart":
        os.setsid()
    return os.open(device, os.O_RDONLY) if way == "reopened" else held


for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        held = os.open(os.devnull if way == "none" else device, os.O_RDONLY)
        for generation in range(1 << 60):
            if time.monotonic() > began + LIMIT_S or os.path.exists(f"{ROSTER}.stop"):
                break
            if generation == 20:
                join("chain")
            if os.fork():
                os._exit(0)
            held = hold(held)
        join("outlived")
        os._exit(0)
if way == "none":
    paused = os.fork()
    if not paused:
        join("paused")
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)
        stay()
    os.waitpid(paused, os.WUNTRACED)
wait_for(ROSTER)
while Path(ROSTER).read_text(encoding="utf-8").count("chain") < 4:
    time.sleep(0.01)
