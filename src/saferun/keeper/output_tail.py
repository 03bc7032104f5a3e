"""Both ends of what a job wrote, kept in memory or read back from a file.

Standard library only: the keeper uses it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable

MEMORY = "saferun-output-"  # with 1 or 2, the name of a memory file: the end of that output
_BYTES_AT = 24  # the offset of the bytes in it
HEAD_BYTES = 64 * 1024  # kept of the beginning: it shows from which step a job went on


class Tail:
    """The last `limit` bytes of what was added, and the first HEAD_BYTES of it.

    With a name, the last bytes lie in a memory file of that name, where who may look into this
    process finds them while the job runs (`shown`): a sequence number, odd while bytes are moved,
    the end of the bytes, the time of the last ones, then the bytes.
    """

    def __init__(self, limit: int, name: str = "") -> None:
        self.limit, self._name = limit, name
        self._place: memoryview | None = None  # three numbers, then 2 * limit bytes
        self._moves = self._end = 0
        self._head = bytearray()

    def add(self, chunk: memoryview) -> None:
        """Add a chunk; costs a copy of at most `limit` bytes."""
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
        """Return what was kept."""
        if self._place is None:
            return b""
        return bytes(self._place[_BYTES_AT:][max(0, self._end - self.limit) : self._end])

    def head(self) -> bytes:
        """Return the first bytes."""
        return bytes(self._head)


def shown(content: bytes) -> tuple[int, bytes, float] | None:
    """Return what a Tail's memory file holds: its sequence number, the bytes, and when they came.

    Args:
        content: of the file.

    Returns:
        The time is on the monotonic clock. None where there is nothing, or while bytes are moved.
        Where the number is another one a moment later, the bytes may be mixed.
    """
    numbers = [int.from_bytes(content[at : at + 8], "little") for at in (0, 8, 16)]
    if len(content) <= _BYTES_AT or numbers[0] % 2 or not numbers[2]:
        return None
    return numbers[0], content[_BYTES_AT : _BYTES_AT + numbers[1]], numbers[2] / 1e9


def _memory(name: str, size: int) -> memoryview:
    """Return memory, in a file of this name where that can be made."""
    try:
        if not name:
            return memoryview(bytearray(size))
        import mmap  # after the job's start, which it does not delay

        file = os.memfd_create(name)
        try:
            os.ftruncate(file, size)
            return memoryview(mmap.mmap(file, size))
        finally:
            os.close(file)
    except (OSError, ImportError, ValueError):
        return memoryview(bytearray(size))


class FileTail:
    """Both ends of what a job wrote to a regular file that it was handed directly."""

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
        """Return the last bytes written since the start; none where the file may not be read."""
        return self._read(lambda start, end: (max(start, end - self.limit), end))

    def head(self) -> bytes:
        """Return the first bytes written since the start."""
        return self._read(lambda start, end: (start, min(end, start + HEAD_BYTES)))

    def _read(self, part: Callable[[int, int], tuple[int, int]]) -> bytes:
        try:
            end = self._end()
            start = self._start if self._start <= end else 0  # it was truncated meanwhile
            start, end = part(start, end)
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(fd, end - start, start)
            finally:
                os.close(fd)
        except OSError:
            return b""
