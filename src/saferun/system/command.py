"""Run a command for a bounded time and keep what it wrote, whatever it does.

What a check asks may hang (nvidia-smi on a sick GPU), ignore SIGTERM, leave grandchildren that hold
its output open, or write without end. So output goes to memory files, which need no disk and no
reader, and the end is a clock's, not a pipe's. The kernel bounds the files: they are made in their
full size, which costs nothing until it is written, and sealed against growth (memfd_create(2)), so
a command that outlives us cannot fill the memory.
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

OUTPUT_LIMIT = 8 << 20  # bytes; `nvidia-smi -q` prints some 15 kB for each GPU
_PAGE = 1 << 16  # the largest; a write that does not fit whole is refused
REAP_S = 0.2  # a killed process that the kernel cannot end is left behind after this
START_S = 1.0  # for commands that other threads are just starting; milliseconds, unless exec hangs


class _Door:
    """What other threads may start, and have started."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.starting = 0  # commands that have been forked, perhaps, and are not in `running` yet
        self.running: set[subprocess.Popen[bytes]] = set()
        self.closed = False

    def shut_for_this_thread(self) -> bool:
        return self.closed and threading.current_thread() is not threading.main_thread()


_door = _Door()


class Answer(NamedTuple):
    """What a command wrote and how it ended."""

    out: str
    err: str
    status: int | None  # None: it could not be started, or was killed here
    trouble: str  # what went wrong, in words; "" where it ended with 0


def run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Answer:
    """Run a command in a session of its own; never raises for what it does.

    Args:
        command: the program and its words; no shell.
        environ: its whole environment.
        timeout_s: then it and its process group are killed; what it wrote until then is kept.
    """
    with _memory_file("out") as out, _memory_file("err") as err:
        try:
            child = _start(tuple(command), environ, out, err)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Answer("", "", None, f"cannot be run ({reason})")
        try:
            cut = _wait(child, (out, err), timeout_s)
        except BaseException:  # Ctrl-C: the child has a session of its own and hears nothing of it
            _kill(child)
            raise
        finally:
            _door.running.discard(child)
        status = None if cut else child.returncode
        return Answer(_content(out), _content(err), status, cut or _in_words(child.returncode))


def _start(
    command: tuple[str, ...], environ: Mapping[str, str], out: int, err: int
) -> subprocess.Popen[bytes]:
    with _door.changed:
        if _door.shut_for_this_thread():
            raise OSError(errno.ECANCELED, "nobody waits for it any more")
        _door.starting += 1
    try:
        child = subprocess.Popen(  # noqa: S603 - a tuple, no shell; what PATH finds is meant
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            start_new_session=True,
        )
        _door.running.add(child)
    finally:
        with _door.changed:
            _door.starting -= 1
            _door.changed.notify_all()
    if _door.shut_for_this_thread():  # it took longer than anybody waited for
        _kill(child)
    return child


@contextlib.contextmanager
def questions() -> Iterator[None]:
    """Let other threads run commands; afterwards none of theirs lives, and none is started."""
    _door.closed = False
    try:
        yield
    finally:
        try:
            with _door.changed:
                _door.closed = True
                _door.changed.wait_for(lambda: not _door.starting, START_S)
        finally:  # a second Ctrl-C
            for child in tuple(_door.running):
                _kill(child)


def on_path(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the program that PATH finds under this name."""
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        program = os.path.join(folder or ".", name)
        if os.access(program, os.X_OK) and os.path.isfile(program):
            return program
    return None


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[int]:
    descriptor = os.memfd_create(f"saferun-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, OUTPUT_LIMIT)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait(child: subprocess.Popen[bytes], files: Sequence[int], timeout_s: float) -> str:
    """Wait for the end; kill at the limits of time and output and say which it was."""
    trouble = f"it did not end within {timeout_s:g} s"
    end = time.monotonic() + timeout_s
    while child.returncode is None and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(left, 0.05))
        if any(_written(file) > OUTPUT_LIMIT - _PAGE for file in files):
            trouble = f"it wrote more than {OUTPUT_LIMIT >> 20} MiB"
            break
    else:
        if child.returncode is not None:
            return ""
    _kill(child)
    try:
        child.wait(REAP_S)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # else its destructor complains
    return trouble


def _written(file: int) -> int:
    """Return how far the command has come: it shares the place in the file with us."""
    return os.lseek(file, 0, os.SEEK_CUR)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:  # else its number may be another's by now
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)


def _content(file: int) -> str:
    return os.pread(file, _written(file), 0).decode("utf-8", "replace")


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}" if status else ""
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
