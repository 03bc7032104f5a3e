"""Both ends of what a job wrote, kept in memory or read back from a file.

Standard library only: the keeper uses it.
"""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES = 64 * 1024  # kept of the beginning: it shows from which step a job went on


class Tail:
    """The last `limit` bytes of what was added, and the first HEAD_BYTES of it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept = bytearray()
        self._head = bytearray()

    def add(self, chunk: memoryview) -> None:
        """Add a chunk; costs a copy of at most `limit` bytes."""
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        if self.limit:
            self._kept += chunk[-self.limit :]
            if len(self._kept) > 2 * self.limit:
                del self._kept[: -self.limit]

    def read(self) -> bytes:
        """Return what was kept."""
        return bytes(self._kept[-self.limit :]) if self.limit else b""

    def head(self) -> bytes:
        """Return the first bytes."""
        return bytes(self._head)


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
