"""Every rank does its work, and crashes while its interpreter shuts down.

    crash_at_exit.py FOLDER | unless-second

A rank waits in FOLDER for the others to have come as far, since torchrun ends those that have not.
With "unless-second", rank 0 works on while the others crash, and the second attempt ends well.
"""

import os
import signal
import sys
import time

(mode,) = sys.argv[1:]
RANK, SIZE = os.environ["RANK"], int(os.environ["WORLD_SIZE"])


class Crash:
    """Dies when the interpreter lets go of it, after the last line and all atexit functions."""

    def __del__(self) -> None:
        if mode != "unless-second":
            os.mkdir(f"{mode}/{RANK}")
            while len(os.listdir(mode)) < SIZE:
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSEGV)


kept = Crash()
if mode == "unless-second":
    if os.environ["SAFERUN_ATTEMPT"] == "2":
        os._exit(0)
    if RANK == "0":
        signal.pause()
print("saved", flush=True)
