"""Ask programs, with a limit on their time and output, whatever they do.

A command may hang (nvidia-smi on a failing GPU), ignore SIGTERM, leave grandchildren that hold its
output open, or write without end. So its output goes to memory files, which need neither a disk nor
a reader, and the command ends by a deadline rather than by the end of a pipe. The kernel limits the
files: they have their full size from the beginning, which uses no memory until it is written, and
are sealed against growth (memfd_create(2)). So a command that outlives us cannot fill the memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from saferun.base.durations import seconds
from saferun.base.signal_names import name_of

OUTPUT_LIMIT = 8 << 20  # bytes; `nvidia-smi -q` prints some 15 kB for each GPU
_PAGE = 1 << 16  # bytes, the largest page; a write that does not fit completely is refused
LOOK_S = 0.05  # between two checks of the output's size, in which it stays far below OUTPUT_LIMIT
REAP_S = 0.2  # after this a killed process that the kernel cannot end is left
START_S = 1.0  # for other threads' commands to start: milliseconds, unless exec hangs


class _Commands:
    """The commands of all threads, and whether threads other than the main one may start more."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.starting = 0  # commands that may be forked but are not yet in `running`
        self.running: set[subprocess.Popen[bytes]] = set()
        self.closed = False

    def closed_for_this_thread(self) -> bool:
        return self.closed and threading.current_thread() is not threading.main_thread()


_commands = _Commands()


class Answer(NamedTuple):
    """The output of a command, and how it ended."""

    out: str
    err: str
    status: int | None  # None: it could not be started, or was killed here
    trouble: str  # an error message; "" if it ended with 0


class Child:
    """A program in its own session, which may be asked whether it has ended; it raises nothing.

    Args:
        command: the program and its arguments; no shell.
        environ: the program's whole environment.
        stdin: a descriptor; none by default.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], *, stdin: int = subprocess.DEVNULL
    ) -> None:
        self._files = _memory_file("out"), _memory_file("err")
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble = ""  # why it has no whole answer
        try:
            self._process = _start(tuple(command), environ, stdin, *self._files)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._trouble = f"cannot be run ({reason})"

    @property
    def pid(self) -> int | None:
        """Return the program's pid; None if it could not be started."""
        return self._process.pid if self._process else None

    def has_ended(self) -> bool:
        """Return whether the program has ended, or could not be started."""
        return self._process is None or self._process.poll() is not None

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; kill the program at a limit of time or output."""
        trouble = f"it did not end within {seconds(timeout_s)}"
        end = time.monotonic() + timeout_s
        while not self.has_ended():
            left_s = end - time.monotonic()
            if any(_written(file) > OUTPUT_LIMIT - _PAGE for file in self._files):
                trouble, left_s = f"it wrote more than {OUTPUT_LIMIT >> 20} MiB", 0.0
            if left_s <= 0:
                self.kill(trouble)
                return
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(min(left_s, LOOK_S))

    def kill(self, why: str = "it was ended") -> bool:
        """Kill the program and its process group; return whether it was still running.

        The kernel may need time for it.
        """
        if self._process is None or self._process.poll() is not None:
            return False
        self._trouble = why
        _kill(self._process)
        try:
            self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = -signal.SIGKILL  # else its destructor warns
        return True

    def take(self) -> Answer:
        """End it; return how it ended and its output, even if it was killed. Call it once."""
        self.kill()
        status = None if self._trouble or self._process is None else self._process.returncode
        out, err = map(_content, self._files)
        for file in self._files:
            os.close(file)
        if self._process is not None:
            _commands.running.discard(self._process)
        return Answer(out, err, status, self._trouble or _end_message(status or 0))


def run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Answer:
    """Run a command to its end.

    Args:
        command: the program and its arguments; no shell.
        environ: the command's whole environment.
        timeout_s: seconds after which the command and its process group are killed.

    Returns:
        How it ended and its output, even if it was killed.
    """
    child = Child(command, environ)
    try:
        child.wait(timeout_s)
    except BaseException:  # Ctrl-C does not reach the child, which has its own session
        child.take()
        raise
    return child.take()


def _start(
    command: tuple[str, ...], environ: Mapping[str, str], stdin: int, out: int, err: int
) -> subprocess.Popen[bytes]:
    with _commands.changed:
        if _commands.closed_for_this_thread():
            raise OSError(errno.ECANCELED, "nobody waits for it any more")
        _commands.starting += 1
    try:
        child = subprocess.Popen(  # noqa: S603 - a tuple, no shell; what PATH finds is meant
            command, stdin=stdin, stdout=out, stderr=err, env=dict(environ), start_new_session=True
        )
        _commands.running.add(child)
    finally:
        with _commands.changed:
            _commands.starting -= 1
            _commands.changed.notify_all()
    if _commands.closed_for_this_thread():  # `questions` has ended
        _kill(child)
    return child


@contextlib.contextmanager
def questions() -> Iterator[None]:
    """Let other threads run commands; at the end these are killed, and no more can start."""
    _commands.closed = False
    try:
        yield
    finally:
        try:
            with _commands.changed:
                _commands.closed = True
                _commands.changed.wait_for(lambda: not _commands.starting, START_S)
        finally:  # even after a second Ctrl-C
            for child in tuple(_commands.running):
                _kill(child)


def _memory_file(name: str) -> int:
    if not hasattr(os, "memfd_create"):  # Python was built with a glibc before 2.27
        import tempfile  # only needed by a Python for such an old glibc

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    descriptor = os.memfd_create(f"saferun-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, OUTPUT_LIMIT)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def _written(file: int) -> int:
    """Return the size of the command's output: it shares the file offset with us."""
    return os.lseek(file, 0, os.SEEK_CUR)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:  # otherwise its pid may be another process
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)


def _content(file: int) -> str:
    return os.pread(file, _written(file), 0).decode("utf-8", "replace")


def _end_message(status: int) -> str:
    if status < 0:
        return f"killed by {name_of(-status)}"
    return f"exit status {status}" if status else ""
