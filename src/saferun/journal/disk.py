"""Work on a disk that may not answer, done in a thread with a limited wait.

A call on a dead NFS mount cannot be interrupted, so the thread may stay. It handles no signal and
does not keep the process from ending.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
from collections.abc import Callable


class BoundedDisk:
    """Do one piece of work at a time, and wait for it only for a limited time."""

    def __init__(self) -> None:
        self._unfinished: _thread.LockType | None = None

    def busy(self) -> bool:
        """Return whether earlier work is still running after its wait ended."""
        if self._unfinished is not None and not self._unfinished.acquire(False):
            return True
        self._unfinished = None
        return False

    def do(self, work: Callable[[], None], limit_s: float) -> OSError | None:
        """Do the work; return None if it was done, else the error (ETIMEDOUT: it hangs)."""
        if self.busy():
            return OSError(errno.ETIMEDOUT, "the disk does not answer")
        problems: list[OSError] = []
        done = self._unfinished = _thread.allocate_lock()
        done.acquire()
        _start(work, problems, done)
        if not done.acquire(timeout=limit_s):
            return OSError(errno.ETIMEDOUT, "the disk does not answer")
        self._unfinished = None
        return problems[0] if problems else None


def _start(work: Callable[[], None], problems: list[OSError], done: _thread.LockType) -> None:
    """Start a thread with signals blocked, so that only the main thread gets them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    try:
        _thread.start_new_thread(_run, (work, problems, done))
    except RuntimeError:  # no thread can be started: better without a limit than not at all
        _run(work, problems, done)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(work: Callable[[], None], problems: list[OSError], done: _thread.LockType) -> None:
    try:
        work()
    except OSError as error:
        problems.append(error)
    except Exception as error:  # our own fault; the job matters more than its record
        problems.append(OSError(errno.EIO, f"{type(error).__name__}: {error}"))
    finally:
        done.release()


def close(descriptor: int) -> None:
    """Close a descriptor; -1 means none."""
    if descriptor >= 0:
        os.close(descriptor)
