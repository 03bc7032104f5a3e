"""The directory of one run: made, locked and written through its own descriptor.

A planted link, or a directory swapped underneath, gets nothing. Every function here may raise
OSError and may hang with its file system: writer.py calls them by way of disk.py.

The run holds LOCK_FILE in its directory as long as it lives, so that `saferun runs clean`
(cleanup.py) spares it on every machine that shares the file system, whatever the journal says.
Cleaning takes that lock with filelock's FileLock, which on Linux is an exclusive flock(2) on the
file (filelock 4.2, `_unix.py`); the run takes the same flock(2) itself, by its own descriptor.
Where the file system has no flock(2), the file names pid and host in the form of
filelock's SoftFileLock, which file_lock.py uses there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from saferun.journal.disk import close, write_all
from saferun.system import paths, procfs, trust

LOCK_FILE = "run.lock"
ALIVE_FILE = "alive"  # when the run last lived, in clock ticks since boot (procfs.now)
STEPS_FILE = "attempt-{}.steps"  # how far an attempt's steps have come (training_steps.py)
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # where a file system has none
NAMES = 10  # directories tried for one run id before it gets a word of its own
_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class RunDirectory:
    """The open directory of one run; made by `make`.

    Attributes:
        path: absolute.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._real: str | None = path  # without links; None where others can replace it
        self._directory = self._of_events = descriptor
        self._events = self._lock = self._alive = -1
        self._shared = False  # other processes append to the events, too
        self._torn = False  # the last line has no end: the next one begins with a newline
        self._parts: dict[str, int] = {}  # descriptors of directories in it, by name

    @classmethod
    def make(cls, base: str, run: str) -> RunDirectory:
        """Make `<base>/<run>`, or where that exists `<base>/<run>-2`, …; lock it.

        Args:
            base: where all runs lie; made with its parents, 0700, where it is missing.
            run: the run's id.

        Raises:
            OSError: it cannot be made or written.
        """
        base = paths.absolute(base)
        parent = _open_base(base)
        try:
            name = _new_directory(parent, _file_name(run))
            descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            owners = (os.geteuid(), os.fstat(parent).st_uid)  # the latter: squashed, fixed owners
            above = os.readlink(f"/proc/self/fd/{parent}")
        finally:
            os.close(parent)
        made = cls(os.path.join(base, name), descriptor)
        made._real = None if trust.gives_way(above) else os.path.join(above, name)
        if os.fstat(descriptor).st_uid not in owners:
            made.close()
            raise OSError(errno.EPERM, "somebody else's directory was put in its place")
        return made

    def prepare(self) -> None:
        """Lock the directory and make what it holds from the start."""
        self._hold()
        os.mkdir("receipts", 0o700, dir_fd=self._directory)
        self._open_events()

    def for_worker(self, number: int) -> RunDirectory:
        """Make the directory of one worker, in a process of its own: the events are shared.

        Raises:
            OSError: it cannot be made.
        """
        name = f"worker-{number}"
        os.mkdir(name, 0o700, dir_fd=self._directory)
        descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._directory)
        made = RunDirectory(os.path.join(self.path, name), descriptor)
        made._of_events, made._shared = os.dup(self._directory), True
        made._real = self._real and os.path.join(self._real, name)
        os.mkdir("receipts", 0o700, dir_fd=descriptor)
        made._open_events()
        return made

    def share(self) -> None:
        """Prepare for other processes that append to the events."""
        self._shared = True

    def _hold(self) -> None:
        """Take the run's lock; without it, cleaning judges by the journal alone."""
        self._lock = os.open(LOCK_FILE, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_FLOCK:
                write_all(self._lock, f"{os.getpid()}\n{os.uname().nodename}\n".encode())

    def append(self, line: bytes) -> None:
        """Append a line to events.jsonl, whole or nothing of it."""
        if self._events >= 0 and os.fstat(self._events).st_nlink == 0:  # somebody deleted it
            close(self._events)
            self._events = -1
        if self._events < 0:
            self._open_events()
        size = os.fstat(self._events).st_size
        try:
            write_all(self._events, b"\n" * self._torn + line)
            self._torn = False
        except OSError:
            self._take_back(size)
            raise
        self.mark()

    def put(self, name: str, content: bytes) -> None:
        """Write a file in one step; a link planted under its name is replaced, not followed."""
        temporary = f".{name}.tmp"
        descriptor = self._new(temporary)
        try:
            try:
                write_all(descriptor, content)
            finally:
                os.close(descriptor)  # a network file system may report here
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            self._unlink(temporary)
            raise

    def mark(self) -> None:
        """Note that the run lives now: what begins later may not be of the run (gpu/orphans.py)."""
        if self._alive < 0:
            self._alive = os.open(ALIVE_FILE, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)
        os.pwrite(self._alive, f"{procfs.now():020d}\n".encode(), 0)

    def flush(self) -> None:
        """Bring the events and the directory to the disk."""
        for descriptor in (self._events, self._directory):
            if descriptor >= 0:
                own = os.dup(descriptor)  # `close` may come while this hangs
                try:
                    os.fsync(own)
                finally:
                    os.close(own)

    def check_receipts(self) -> None:
        """Fail unless the path leads to the directory that this run made, and not by a link."""
        if self._real is None:
            return  # `part` does not go by the path
        ours = os.stat("receipts", dir_fd=self._directory, follow_symlinks=False)
        by_path = os.lstat(os.path.join(self.path, "receipts"))
        if not stat.S_ISDIR(ours.st_mode) or not os.path.samestat(ours, by_path):
            raise OSError(errno.ESTALE, "another directory was put in its place")

    def part(self, name: str) -> str:
        """Return the path of a directory in this one, for what the job's processes write.

        Where somebody else can put another directory in this one's place the path leads to ours by
        a descriptor of this process, whatever the name leads to.
        """
        if self._real is not None:
            return os.path.join(self._real, name)
        if name not in self._parts:
            self._parts[name] = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._directory)
        return f"/proc/{os.getpid()}/fd/{self._parts[name]}"

    def make_state(self) -> None:
        """Make the directory that the processes of the run share."""
        os.mkdir("state", 0o700, dir_fd=self._directory)

    def make_flight(self) -> None:
        """Make the directory for torch's flight records, where named pipes can be made in it.

        Not every file system has them, and torch ends a rank that cannot make its own.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir("flight", 0o700, dir_fd=self._directory)
        tried = f"flight/tried-{os.getpid()}"
        os.mkfifo(tried, 0o600, dir_fd=self._directory)
        os.unlink(tried, dir_fd=self._directory)

    def close(self) -> None:
        """Close all descriptors; the kernel frees the lock."""
        own = {self._events, self._directory, self._of_events, self._lock, self._alive}
        own.update(self._parts.values())
        for descriptor in own:
            close(descriptor)
        self._events = self._directory = self._of_events = self._lock = self._alive = -1

    def _open_events(self) -> None:
        self._events = os.open("events.jsonl", _FILE | os.O_APPEND, 0o600, dir_fd=self._of_events)
        status = os.fstat(self._events)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            close(self._events)
            self._events = -1
            raise OSError(errno.EEXIST, "something else was put in its place")

    def _take_back(self, size: int) -> None:
        """Cut off the part of a line that was written, unless others may have written after it."""
        if self._shared:
            self._torn = True
            return
        try:
            os.ftruncate(self._events, size)
        except OSError:
            self._torn = True

    def _new(self, name: str) -> int:
        try:
            return os.open(name, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)
        except FileExistsError:
            self._unlink(name)
            return os.open(name, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._directory)
        except OSError:
            return  # what matters is why it could not be written


def _file_name(run: str) -> str:
    name = run.replace("/", "_").replace("\0", "_")
    return name if name.strip(".") else "run"


def _open_base(base: str) -> int:
    """Open the directory of all runs; make it where it is missing.

    Raises:
        OSError: it cannot be made or opened, or it is a link that somebody else has planted.
    """
    paths.make(base)
    status = os.lstat(base)
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, "it is somebody else's symbolic link")
    return os.open(base, _DIRECTORY)


def _new_directory(parent: int, run: str) -> str:
    """Make a directory that nobody had before and return its name.

    mkdir(2) is exclusive on every file system, NFS included: two runs, or two nodes of one run,
    never share a directory. Pods begin with the same pid: where a thousand of them begin within a
    second, each would try all names that the others have taken.
    """
    numbered = [run, *(f"{run}-{number}" for number in range(2, NAMES + 1))]
    for name in (*numbered, f"{run}-{os.urandom(6).hex()}"):
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            continue
        return name
    raise OSError(errno.EEXIST, f"{NAMES} runs have this name")


def remove_empty(path: str) -> None:
    """Remove the directory of a run in which no attempt has left anything.

    Raises:
        OSError: something is in it after all, or it cannot be removed.
    """
    paths.remove_dir(path, _empty)


def _empty(directory: int) -> None:
    for name in os.listdir(directory):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)
