"""Work on a disk that may not answer: done in a thread that is waited for a bounded time.

No call of a dead NFS mount can be interrupted, so the thread may stay behind. It takes no signal
and does not keep the process from ending.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
from collections.abc import Callable


class BoundedDisk:
    """Does one piece of work at a time and waits for it only so long."""

    def __init__(self) -> None:
        self._unfinished: _thread.LockType | None = None

    def busy(self) -> bool:
        """Return whether work that was no longer waited for is still being done."""
        if self._unfinished is not None and not self._unfinished.acquire(False):
            return True
        self._unfinished = None
        return False

    def do(self, work: Callable[[], None], limit_s: float) -> OSError | None:
        """Return None where the work was done, else why not (ETIMEDOUT: it hangs)."""
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
    """Start a thread with signals blocked: those are for the thread that waits for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    try:
        _thread.start_new_thread(_run, (work, problems, done))
    except RuntimeError:  # no thread can be started: better unbounded than not at all
        _run(work, problems, done)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(work: Callable[[], None], problems: list[OSError], done: _thread.LockType) -> None:
    try:
        work()
    except OSError as error:
        problems.append(error)
    except Exception as error:  # our fault; the job matters more than its record
        problems.append(OSError(errno.EIO, f"{type(error).__name__}: {error}"))
    finally:
        done.release()


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of the content; write(2) may take less at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def close(descriptor: int) -> None:
    """Close a descriptor; -1 stands for none."""
    if descriptor >= 0:
        os.close(descriptor)
