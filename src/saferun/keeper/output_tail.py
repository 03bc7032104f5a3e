"""Both ends of a job's output, kept in memory or read back from a file.

This module uses only the standard library, since the keeper uses it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable

MEMORY = "saferun-output-"  # with 1 or 2, the name of a memory file: the end of that output
_BYTES_AT = 24  # offset of the bytes in it
HEAD_BYTES = 64 * 1024  # kept of the beginning, which shows the step at which a job resumed


class Tail:
    """The last `limit` bytes that were added, and the first HEAD_BYTES.

    With a name, the last bytes are in a memory file of that name. Processes with the right to
    inspect this one can read it while the job runs (`shown`). It has a sequence number, which is
    odd while bytes are moved, the end of the bytes, the time of the last ones, then the bytes.
    """

    def __init__(self, limit: int, name: str = "") -> None:
        self.limit, self._name = limit, name
        self._place: memoryview | None = None  # three numbers, then 2 * limit bytes
        self._moves = self._end = 0
        self._head = bytearray()

    def add(self, chunk: memoryview) -> None:
        """Add a chunk; this copies at most `limit` bytes."""
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        if self.limit and chunk:
            self._keep(chunk[-self.limit :])

    def _keep(self, piece: memoryview) -> None:
        if self._place is None:
            self._place = _memory(self._name, _BYTES_AT + 2 * self.limit)
        bytes_, count = self._place[_BYTES_AT:], len(piece)
        if self._end + count > len(bytes_):
            kept = self.limit - count
            self._note(0, self._moves + 1)
            bytes_[:kept] = bytes_[self._end - kept : self._end]
            self._end, self._moves = kept, self._moves + 2
            self._note(1, kept)
            self._note(0, self._moves)
        bytes_[self._end : self._end + count] = piece
        self._end += count
        self._note(1, self._end)
        self._note(2, time.monotonic_ns())

    def _note(self, which: int, number: int) -> None:
        assert self._place is not None
        self._place[which * 8 : which * 8 + 8] = number.to_bytes(8, "little")

    def read(self) -> bytes:
        """Return the bytes that were kept."""
        if self._place is None:
            return b""
        return bytes(self._place[_BYTES_AT:][max(0, self._end - self.limit) : self._end])

    def head(self) -> bytes:
        """Return the first bytes."""
        return bytes(self._head)


def shown(content: bytes) -> tuple[int, bytes, float] | None:
    """Return the content of a Tail's memory file: sequence number, bytes, and their time.

    Args:
        content: the file's content.

    Returns:
        The time is on the monotonic clock. The result is None if there is nothing, or while bytes
        are moved. If the number has changed a moment later, the bytes may be mixed.
    """
    numbers = [int.from_bytes(content[at : at + 8], "little") for at in (0, 8, 16)]
    if len(content) <= _BYTES_AT or numbers[0] % 2 or not numbers[2]:
        return None
    return numbers[0], content[_BYTES_AT : _BYTES_AT + numbers[1]], numbers[2] / 1e9


def _memory(name: str, size: int) -> memoryview:
    """Return memory, in a file of this name if possible."""
    try:
        if not name:
            return memoryview(bytearray(size))
        import mmap  # after the job's start, so that it is not delayed

        file = os.memfd_create(name)
        try:
            os.ftruncate(file, size)
            return memoryview(mmap.mmap(file, size))
        finally:
            os.close(file)
    except (OSError, ImportError, ValueError):
        return memoryview(bytearray(size))


class FileTail:
    """Both ends of the output that a job wrote directly to a regular file."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd, self.limit = fd, limit
        self.begin()

    def begin(self) -> None:
        """Count only what is written from now on."""
        self._start = self._end()

    def _end(self) -> int:
        if fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_APPEND:
            return os.fstat(self._fd).st_size
        return os.lseek(self._fd, 0, os.SEEK_CUR)

    def read(self) -> bytes:
        """Return the last bytes written since the start; b"" if the file may not be read."""
        return self._read(lambda start, end: (max(start, end - self.limit), end))

    def head(self) -> bytes:
        """Return the first bytes written since the start."""
        return self._read(lambda start, end: (start, min(end, start + HEAD_BYTES)))

    def _read(self, part: Callable[[int, int], tuple[int, int]]) -> bytes:
        try:
            end = self._end()
            start = self._start if self._start <= end else 0  # the file was truncated
            start, end = part(start, end)
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(fd, end - start, start)
            finally:
                os.close(fd)
        except OSError:
            return b""
