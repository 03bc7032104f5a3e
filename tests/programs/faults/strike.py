"""What goes wrong in the programs beside this file, as a bug in a real job would do it."""

import ctypes
import os
import signal
import sys
import time


def attempt_in(attempts: str) -> bool:
    """Tell whether this is one of those attempts ("1", "1,2", "any")."""
    return attempts == "any" or os.environ.get("SAFERUN_ATTEMPT") in attempts.split(",")


def strike(fault: str) -> None:
    """Do what a fault's name says: SIGNAME, exitN, raise, segv, or orphan-output."""
    sys.stdout.flush()
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
        signal.pause()
    elif fault.startswith("exit"):
        os._exit(int(fault[4:]))
    elif fault == "raise":
        raise RuntimeError("size mismatch in the user's own code")
    elif fault == "segv":
        ctypes.string_at(0)
    elif fault == "orphan-output":
        _write_after_death()
    else:
        raise AssertionError(f"no such fault: {fault}")


def _write_after_death() -> None:
    """Die, and have a child write once this process is gone."""
    rank = os.getpid()
    if os.fork() == 0:
        while os.getppid() == rank:
            time.sleep(0.001)
        os.write(1, b"written after the rank's death\n")
        os._exit(0)
    os.kill(rank, signal.SIGKILL)
    signal.pause()
