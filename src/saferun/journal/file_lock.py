"""Locks between processes on files of ours, by the filelock package, with a bounded wait.

For what is written rarely and off the launch path (importing filelock takes 25 ms). Wherever torch
is installed filelock is, too (torch depends on it), so the generated bash script may rely on it. On
Linux a FileLock is an exclusive flock(2), which also holds between the nodes of an NFS mount. Where
the file system has no flock(2) (Lustre mounted without `-o flock`: ENOSYS), the existence of a file
with pid and host is the lock (SoftFileLock): filelock 4 changes over by itself, older releases
raise NotImplementedError. A SoftFileLock is only broken on proof, by its own host; where a machine
went down with it, its file has to be removed by hand, and the error says so.

The GPU locks (gpu/lock.py) and the claims on compile caches (gpu/orphans.py) have reasons of their
own for using flock(2) directly; they stand there.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from filelock import BaseFileLock


class HeldError(OSError):
    """Another process has the lock, and had it for as long as we waited."""


@contextlib.contextmanager
def exclusive(path: str, wait_s: float) -> Iterator[None]:
    """Hold the lock on a file for the time of a `with` block.

    Args:
        path: of the lock file; made 0600 where it is missing, and left there.
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
    from filelock import FileLock, SoftFileLock, Timeout

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that filelock changes over to a SoftFileLock
        try:
            lock: BaseFileLock = FileLock(path, timeout=wait_s, mode=0o600)
            try:
                lock.acquire()
            except NotImplementedError:  # filelock 3: no flock(2) here
                path += ".soft"  # its FileLock has left an empty file under the path itself
                lock = SoftFileLock(path, timeout=wait_s, mode=0o600)
                lock.acquire()
        except Timeout:
            raise HeldError(errno.EAGAIN, f"another process holds {path}", path) from None
    return lock
