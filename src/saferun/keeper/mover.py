"""Move the job's output so that no byte is lost, whenever the keeper is killed.

The bytes that a process has read but not yet written die with it. Here the kernel moves the bytes
from the job's pipe to our output in one step (splice(2)) after a look at them (tee(2)): bytes that
have not arrived are still in the pipe, which saferun holds, too.

This module uses only the standard library, since the keeper uses it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
from collections.abc import Callable

from saferun.keeper.output_ends import OutputPipes

_MOST_BYTES = 1 << 20  # most bytes that one look shows; the pipe for it holds less
_NONBLOCK = 2  # SPLICE_F_NONBLOCK of fcntl.h
# A read of a terminal returns at most 4 KiB: after one of this size there is probably more.
_FULL_READ_BYTES, _GATHER_READS = 2048, 8
_REFUSALS = (errno.EINVAL, errno.ENOSYS, errno.EPERM)


class Mover:
    """Move the job's output to our output.

    Args:
        ends: the job's pipe or terminal, and our output.
    """

    def __init__(self, ends: OutputPipes) -> None:
        self._job, self._target = ends.ours, ends.outer
        self._stage_in = ends.stage_in
        self._source = ends.ours if ends.stage_out < 0 else ends.stage_out
        self._peek_out, self._peek_in = os.pipe()
        self._tee = ctypes.CDLL(None, use_errno=True).tee

    def works(self) -> bool:
        """Return whether the kernel can do this for these ends, which must still be empty."""
        steps: list[Callable[[], object]] = [
            self._copy,
            lambda: self._splice(self._source, self._target, 1),
        ]
        if self._stage_in >= 0:
            steps.append(self._gather)
        return not any(_refused(step) for step in steps)

    def close(self) -> None:
        """Close what this object has opened."""
        for fd in (self._peek_out, self._peek_in):
            os.close(fd)

    def peek(self) -> bytes:
        """Return the next bytes, which stay in the job's pipe; b"" at the end.

        Raises:
            BlockingIOError: there are no bytes now.
            OSError: the job has closed its terminal.
        """
        if self._stage_in >= 0:
            self._gather()
        count = self._copy()
        return os.read(self._peek_out, count) if count else b""

    def move(self, count: int) -> None:
        """Move the bytes that were seen; blocks while the reader is slow.

        Raises:
            OSError: the reader is gone.
        """
        while count:
            try:
                count -= self._splice(self._source, self._target, count)
            except BlockingIOError:
                select.select([], [self._target], [])

    def _copy(self) -> int:
        count = int(self._tee(self._source, self._peek_in, ctypes.c_size_t(_MOST_BYTES), _NONBLOCK))
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return count

    def _gather(self) -> None:
        """Read what the job's terminal has."""
        for reads in range(_GATHER_READS):
            try:
                count = self._splice(self._job, self._stage_in, 2 * _FULL_READ_BYTES)
            except OSError:  # nothing more now, or the end: the next call shows which
                if not reads:
                    raise
                return
            if count < _FULL_READ_BYTES:
                return

    @staticmethod
    def _splice(source: int, target: int, count: int) -> int:
        return os.splice(source, target, count, flags=_NONBLOCK)


def mover(ends: OutputPipes) -> Mover | None:
    """Return an object that moves a channel's bytes; None if the kernel cannot do it.

    It is not used for a socket: a writer to a pipe could not be killed while the pipe is emptied
    into a socket that takes nothing.
    """
    if not hasattr(os, "splice") or stat.S_ISSOCK(os.fstat(ends.outer).st_mode):
        return None
    found = Mover(ends)
    if found.works():
        return found
    found.close()
    return None


def _refused(step: Callable[[], object]) -> bool:
    try:
        step()
    except OSError as error:
        return error.errno in _REFUSALS
    return False
