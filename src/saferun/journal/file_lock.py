"""Locks between processes on saferun's files, by the filelock package, with a limited wait.

They are for files that are written rarely and not during a launch (importing filelock takes 25 ms).
torch depends on filelock, so the generated bash script may rely on it. On Linux a FileLock is an
exclusive flock(2), which also works between the nodes of an NFS mount. If the file system has no
flock(2) (Lustre mounted without `-o flock`: ENOSYS), the existence of a file with pid and host is
the lock (SoftFileLock). On the host that made it, filelock 4 breaks a proven stale one (4.1, the
last for Python 3.10, does not take it in the same attempt). If that machine has gone down, or with
an older filelock, the file must be removed by hand, and the error says so.

The GPU locks (gpu/lock/gpu_locks.py) and the claims on compile caches (gpu/orphans.py) use flock(2)
directly, for reasons that are given there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports asyncio, which a launch would wait for
    from filelock import BaseFileLock

NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # from a file system without flock(2)


class HeldError(OSError):
    """Another process held the lock during our whole wait."""


@contextlib.contextmanager
def exclusive(path: str, wait_s: float) -> Iterator[None]:
    """Hold the lock on a file during a `with` block.

    Args:
        path: the lock file; created with mode 0600 if it is missing, and left there.
        wait_s: longest wait for another process, in seconds; 0: one attempt.

    Raises:
        HeldError: another process has the lock.
        OSError: no lock is possible here: a read-only file system, no permission.
    """
    lock = _acquire(path, wait_s)
    try:
        yield
    finally:
        lock.release()


def record(path: str) -> bytes:
    """Return what makes a file a SoftFileLock that this process holds, until it ends.

    The words are filelock's own, which differ by release: 4.3 also names the pid namespace, and
    takes no lock for stale whose record lacks it. The lock object is not kept: a forked process
    would release it.

    Args:
        path: a file `<path>.record` is made for a moment.

    Raises:
        OSError: it cannot be made.
    """
    from filelock import SoftFileLock  # 25 ms: it imports asyncio

    with (
        SoftFileLock(f"{path}.record", timeout=0, mode=0o600) as lock,
        open(lock.lock_file, "rb") as file,
    ):
        return file.read()


def _acquire(path: str, wait_s: float) -> BaseFileLock:
    from filelock import FileLock, SoftFileLock, Timeout  # 25 ms: it imports asyncio

    # Without flock(2) a FileLock would empty the existing file before it reports that.
    kind = FileLock if _has_flock(os.path.dirname(path) or ".") else SoftFileLock
    lock = kind(path, timeout=wait_s, mode=0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filelock warns about a lock that it breaks
        for broken in (False, True):
            try:
                lock.acquire()
                break
            except Timeout:  # filelock 4.1 may have just broken it
                if broken or os.path.lexists(path):
                    raise HeldError(errno.EAGAIN, f"another process holds {path}", path) from None
    return lock


def _has_flock(directory: str) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True  # the lock itself reports the error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_FLOCK
    finally:
        os.close(descriptor)
    return True
