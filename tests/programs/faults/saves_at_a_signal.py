"""Ranks of which rank 0 saves at SIGUSR1, for as long as there is no file `gate`, and goes on.

The argument is a directory: `up-RANK`, `saving` and `saved` come into it, one line a signal, and
the job ends well when `stop` is there. The other ranks, and a helper of rank 0, have no handler.
"""

import os
import signal
import subprocess
import sys
import time

place, rank = sys.argv[1], os.environ["RANK"]


def note(name):
    with open(f"{place}/{name}", "a", encoding="utf-8") as file:
        file.write(f"{rank}\n")


def wait_for(name):
    while not os.path.exists(f"{place}/{name}"):
        time.sleep(0.02)


def save(number, frame):
    note("saving")
    wait_for("gate")
    note("saved")


helper = None
if rank == "0":
    helper = subprocess.Popen([sys.executable, "-ISc", "import signal; signal.pause()"])
    signal.signal(signal.SIGUSR1, save)
note(f"up-{rank}")
wait_for("stop")
if helper is not None:
    helper.terminate()
    sys.exit(helper.wait() != -signal.SIGTERM)  # it has not died of another
