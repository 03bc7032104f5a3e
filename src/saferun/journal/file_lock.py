"""Locks between processes on files of ours, by the filelock package, with a bounded wait.

For what is written rarely and off the launch path (importing filelock takes 25 ms). Wherever torch
is installed filelock is, too (torch depends on it), so the generated bash script may rely on it. On
Linux a FileLock is an exclusive flock(2), which also holds between the nodes of an NFS mount. Where
the file system has no flock(2) (Lustre mounted without `-o flock`: ENOSYS), the existence of a file
with pid and host is the lock (SoftFileLock). filelock 4 breaks one on proof, by its own host (4.1,
the last for Python 3.10, does not take it at once); where a machine went down with it, or with an
older filelock, the file has to be removed by hand, and the error says so.

The GPU locks (gpu/lock/gpu_locks.py) and the claims on compile caches (gpu/orphans.py) have reasons
of their own for using flock(2) directly; they stand there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from saferun.journal.run_directory import NO_FLOCK

if TYPE_CHECKING:  # it imports asyncio, which a launch would wait for
    from filelock import BaseFileLock


class HeldError(OSError):
    """Another process has the lock, and had it for as long as we waited."""


@contextlib.contextmanager
def exclusive(path: str, wait_s: float) -> Iterator[None]:
    """Hold the lock on a file for the time of a `with` block.

    Args:
        path: the lock file; made 0600 where it is missing, and left there.
        wait_s: the most seconds to wait for another process; 0: one attempt.

    Raises:
        HeldError: another process has it.
        OSError: there can be no lock here: a read-only file system, no permission.
    """
    lock = _acquire(path, wait_s)
    try:
        yield
    finally:
        lock.release()


def _acquire(path: str, wait_s: float) -> BaseFileLock:
    from filelock import FileLock, SoftFileLock, Timeout  # 25 ms: it imports asyncio

    # A FileLock without flock(2) would empty what is there before it says so.
    kind = FileLock if _has_flock(os.path.dirname(path) or ".") else SoftFileLock
    lock = kind(path, timeout=wait_s, mode=0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filelock warns of a lock that it breaks
        for broken in (False, True):
            try:
                lock.acquire()
                break
            except Timeout:  # filelock 4.1 may have broken it just now
                if broken or os.path.lexists(path):
                    raise HeldError(errno.EAGAIN, f"another process holds {path}", path) from None
    return lock


def _has_flock(directory: str) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True  # the lock itself says what is wrong
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_FLOCK
    finally:
        os.close(descriptor)
    return True
