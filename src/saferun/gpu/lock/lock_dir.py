"""The directory of all users' GPU locks, checked when it is opened, and flock(2) in it.

Its files are empty and have mode 0666; the directory is sticky. gpu_locks.py explains the files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from typing import NamedTuple

from saferun.base import proc

OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_TAKEN = (errno.EAGAIN, errno.EACCES)
# The file exists, but is not accessible, or is a directory, a link or a device without a driver.
_BLOCKED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class UnusableError(Exception):
    """Locks cannot work here; the text says why. It never leaves this room's `acquire`."""


class BlockedError(UnusableError):
    """A lock file's place has an object that cannot be locked, perhaps on behalf of another run."""


class LockDirectory(NamedTuple):
    """An open lock directory; its files are accessed only through the descriptor."""

    descriptor: int
    path: str

    @classmethod
    def find(cls, directory: str | None, environ: Mapping[str, str]) -> LockDirectory:
        """Return the first directory that exists and is usable, else the first that can be made.

        An existing directory comes first, so that users who may write below /run/lock and users who
        may not use the same one.
        """
        paths = [directory] if directory else _directories(environ)
        trouble = ""
        for make in (False, True):
            for path in paths:
                try:
                    return cls(_open_directory(path, make=make), path)
                except UnusableError as error:
                    trouble = str(error)
                except OSError as error:
                    trouble = trouble or f"{path}: {error.strerror}"
        raise UnusableError(trouble)

    def names(self) -> frozenset[str]:
        """Return the names of all its files."""
        return frozenset(os.listdir(self.descriptor))

    def take(self, name: str, *, alone: bool) -> int | None:
        """Open and lock a file; None if another process holds it.

        If a cleaner of /tmp removes the file meanwhile, it is created again: nobody sees a lock on
        a file without a name. (systemd-tmpfiles spares locked files.)

        Args:
            name: the file's name.
            alone: take the lock exclusively, not shared.
        """
        for _ in range(8):
            try:
                descriptor = _open_shared(self.descriptor, name)
            except OSError as error:
                kind = BlockedError if error.errno in _BLOCKED else UnusableError
                raise kind(f"{self.path}/{name}: {error.strerror}") from None
            try:
                locked = _flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                if locked and self._still(name, descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if not locked:
                return None
        raise UnusableError(f"{self.path}/{name} is removed again and again")

    def is_held(self, name: str, *, shared: bool) -> bool:
        """Return whether a lock of this kind would be refused, without keeping a lock.

        Args:
            name: the file's name.
            shared: ask for a shared lock, not an exclusive one.
        """
        try:
            descriptor = os.open(name, os.O_RDONLY | OPEN, dir_fd=self.descriptor)
        except OSError:
            return False
        try:
            return not _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        finally:
            os.close(descriptor)

    def locked_by(self, name: str) -> list[int]:
        """Return the living processes that took a flock(2) on the file, as the kernel lists them.

        The columns of /proc/locks are in proc_locks(5). An inherited lock names the process that
        took it.
        """
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            rows = [line.split() for line in proc.text("/proc/locks").splitlines()]
        except OSError:
            return []
        inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        pids = (int(row[4]) for row in rows if row[1:2] == ["FLOCK"] and row[5] == inode)
        return [pid for pid in pids if pid > 0 and proc.start(pid) is not None]

    def _still(self, name: str, descriptor: int) -> bool:
        try:
            named = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        opened = os.fstat(descriptor)
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.descriptor)


def _directories(environ: Mapping[str, str]) -> list[str]:
    """Return possible places for locks, best first: a user's own TMPDIR excludes other users."""
    own = environ.get("TMPDIR", "")
    places = ["/run/lock/saferun", "/tmp/saferun-lock"]  # noqa: S108 - checked when it is opened
    return [*places, os.path.join(own, "saferun-lock")] if os.path.isabs(own) else places


def _open_directory(path: str, *, make: bool) -> int:
    """Open a lock directory with mode 1777, not a symbolic link; ours is corrected or created."""
    if make:
        with Umask():
            _mkdir(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | OPEN)
    except NotADirectoryError:
        raise UnusableError(f"{path} is not a directory, or is a symbolic link") from None
    try:
        status = os.fstat(descriptor)
        if stat.S_IMODE(status.st_mode) != 0o1777 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o1777)
            status = os.fstat(descriptor)
        if stat.S_IMODE(status.st_mode) != 0o1777:
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            raise UnusableError(f"{path} has mode {mode} and not 1777, and belongs to another user")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mkdir(path: str) -> None:
    try:
        os.mkdir(path, 0o1777)  # created with its mode: another user may look right now
    except FileExistsError:
        return


def _open_shared(directory: int, name: str) -> int:
    """Open a file that all users lock; create it if it is missing, and change nothing else.

    O_CREAT on another user's file in a sticky directory fails with fs.protected_regular, so an
    existing file is opened without it. Locking needs only read access, except on NFS.
    """
    for _ in range(8):
        try:
            return _checked(_open_existing(directory, name), name)
        except FileNotFoundError:
            pass
        try:
            with Umask():
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN
                return os.open(name, flags, 0o666, dir_fd=directory)
        except FileExistsError:
            continue
    raise UnusableError(f"{name} comes and goes")


def _open_existing(directory: int, name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | OPEN, dir_fd=directory)
    except PermissionError:
        return os.open(name, os.O_RDONLY | OPEN, dir_fd=directory)


def _checked(descriptor: int, name: str) -> int:
    """Refuse a planted pipe, device, or hard link to somebody's file."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise BlockedError(f"{name} is not a plain file of its own")


def _flock(descriptor: int, kind: int) -> bool:
    """Lock immediately or not at all; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno in _NO_FLOCK:
            raise UnusableError(f"the file system has no locks ({error.strerror})") from None
        raise
    return True


class Umask:
    """Clear the umask while a shared file is created, so that its mode is never narrower.

    The umask concerns the whole process: locks are taken before saferun has a second thread.
    """

    def __enter__(self) -> None:
        self._before = os.umask(0)

    def __exit__(self, *_: object) -> None:
        os.umask(self._before)
