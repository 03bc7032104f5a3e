"""The directory of one run: created, locked and written through its own descriptor.

A planted link, or a directory that is swapped under its name, gets nothing. Every function here may
raise OSError and may hang with its file system: writer.py calls them through disk.py.

The run holds LOCK_FILE in its directory while it lives, so that `saferun runs clean` (cleanup.py)
spares it on every machine that shares the file system, whatever the journal says. Cleaning takes
that lock with filelock's FileLock, which on Linux is an exclusive flock(2) on the file (filelock
4.2, `_unix.py`); the run itself takes the same flock(2) on its own descriptor. If the file system
has no flock(2), the file contains what filelock's SoftFileLock writes, which file_lock.py uses in
that case.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from saferun.base import files
from saferun.journal.disk import close
from saferun.journal.file_lock import NO_FLOCK, record
from saferun.system import paths, procfs, trust

LOCK_FILE = "run.lock"
ALIVE_FILE = "alive"  # time of the run's last sign of life, in clock ticks since boot (procfs.now)
STEPS_FILE = "attempt-{}.steps"  # the attempt's steps over time (training_steps.py)
NAMES = 10  # directory names tried for one run id before a random word is added
_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class RunDirectory:
    """The open directory of one run; made by `make`.

    Attributes:
        path: absolute.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._real: str | None = path  # without links; None if others can replace it
        self._directory = self._of_events = descriptor
        self._events = self._lock = self._alive = -1
        self._shared = False  # other processes append to the events, too
        self._torn = False  # the last line is incomplete: the next one begins with a newline
        self._parts: dict[str, int] = {}  # name -> descriptor of a directory in it

    @classmethod
    def make(cls, base: str, run: str) -> RunDirectory:
        """Create and lock `<base>/<run>`, or, if that exists, `<base>/<run>-2`, ….

        Args:
            base: the directory of all runs; created with its parents, 0700, if it is missing.
            run: the run's id.

        Raises:
            OSError: the directory cannot be created or written to.
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
        """Lock the directory and create its initial content."""
        self._hold()
        os.mkdir("receipts", 0o700, dir_fd=self._directory)
        self._open_events()

    def for_worker(self, number: int) -> RunDirectory:
        """Create the directory of one worker, in the worker's process: the events are shared.

        Raises:
            OSError: the directory cannot be created.
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
        """Take the run's lock; without it, cleaning judges only by the journal."""
        self._lock = os.open(LOCK_FILE, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_FLOCK:
                files.write_all(self._lock, record(os.path.join(self.path, LOCK_FILE)))

    def append(self, line: bytes) -> None:
        """Append a complete line to events.jsonl, or nothing."""
        if self._events >= 0 and os.fstat(self._events).st_nlink == 0:  # somebody deleted it
            close(self._events)
            self._events = -1
        if self._events < 0:
            self._open_events()
        size = os.fstat(self._events).st_size
        try:
            files.write_all(self._events, b"\n" * self._torn + line)
            self._torn = False
        except OSError:
            self._take_back(size)
            raise
        self.mark()

    def put(self, name: str, content: bytes) -> None:
        """Write a file atomically; a link planted under its name is replaced, not followed."""
        files.replace(name, content, directory=self._directory)

    def mark(self) -> None:
        """Note that the run lives now: later processes may not be of the run (gpu/orphans.py)."""
        if self._alive < 0:
            self._alive = os.open(ALIVE_FILE, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)
        os.pwrite(self._alive, f"{procfs.now():020d}\n".encode(), 0)

    def flush(self) -> None:
        """Flush the events and the directory to disk."""
        for descriptor in (self._events, self._directory):
            if descriptor >= 0:
                own = os.dup(descriptor)  # `close` may be called while this hangs
                try:
                    os.fsync(own)
                finally:
                    os.close(own)

    def check_receipts(self) -> None:
        """Fail unless the path leads, without links, to the directory that this run created."""
        if self._real is None:
            return  # `part` does not use the path
        ours = os.stat("receipts", dir_fd=self._directory, follow_symlinks=False)
        by_path = os.lstat(os.path.join(self.path, "receipts"))
        if not stat.S_ISDIR(ours.st_mode) or not os.path.samestat(ours, by_path):
            raise OSError(errno.ESTALE, "another directory was put in its place")

    def part(self, name: str) -> str:
        """Return the path of a subdirectory for the files of the job's processes.

        If another user can replace this directory, the path leads to ours by a descriptor of this
        process, wherever the name leads.
        """
        if self._real is not None:
            return os.path.join(self._real, name)
        if name not in self._parts:
            self._parts[name] = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._directory)
        return f"/proc/{os.getpid()}/fd/{self._parts[name]}"

    def make_state(self) -> None:
        """Create the directory that the run's processes share."""
        os.mkdir("state", 0o700, dir_fd=self._directory)

    def make_flight(self) -> None:
        """Create the directory for torch's flight records if named pipes are possible in it.

        Not every file system has them, and torch ends a rank that cannot create its pipe.
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
        """Cut off a partly written line, unless others may have written after it."""
        if self._shared:
            self._torn = True
            return
        try:
            os.ftruncate(self._events, size)
        except OSError:
            self._torn = True


def _file_name(run: str) -> str:
    name = run.replace("/", "_").replace("\0", "_")
    return name if name.strip(".") else "run"


def _open_base(base: str) -> int:
    """Open the directory of all runs; create it if it is missing.

    Raises:
        OSError: the directory cannot be created or opened, or is a link that another user has
            planted.
    """
    paths.make(base)
    status = os.lstat(base)
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, "it is somebody else's symbolic link")
    return os.open(base, _DIRECTORY)


def _new_directory(parent: int, run: str) -> str:
    """Create a new directory and return its name.

    mkdir(2) is exclusive on every file system, NFS included: two runs, or two nodes of one run,
    never share a directory. Pods begin with the same pid: if a thousand of them begin within a
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
    """Remove the directory of a run in which no attempt has left a file.

    Raises:
        OSError: the directory is not empty, or cannot be removed.
    """
    paths.remove_dir(path, _empty)


def _empty(directory: int) -> None:
    for name in os.listdir(directory):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)
