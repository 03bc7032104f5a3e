"""What saferun and its keeper say to each other: a length and a marshalled list, through pipes.

Standard library only.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False  # typing costs 5 ms at the start of every attempt
if TYPE_CHECKING:
    from typing import Any

HURRIED_DRAIN_S = 2.0  # for output that waits for a slow reader once somebody wants an end


def send(fd: int, message: Any) -> None:
    """Write one message; a reader that went away is no error."""
    data = marshal.dumps(message)
    view = memoryview(len(data).to_bytes(8, "little") + data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        return


class Inbox:
    """Reads messages as they come."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._data = b""
        self._waiting: list[Any] = []

    def first(self) -> Any:
        """Wait for one message and return it alone; None when no more can come."""
        while not self._waiting and not self.closed:
            self._waiting = self._fetch()
        return self._waiting.pop(0) if self._waiting else None

    def waiting(self) -> list[Any]:
        """Return the messages that came together with the `first`."""
        messages, self._waiting = self._waiting, []
        return messages

    def read(self) -> list[Any]:
        """Read once (blocks if nothing has come) and return the messages that are complete."""
        return self.waiting() + self._fetch()

    def _fetch(self) -> list[Any]:
        data = os.read(self.fd, 1 << 20)
        self.closed = not data
        self._data += data
        messages = []
        while len(self._data) >= 8:
            end = 8 + int.from_bytes(self._data[:8], "little")
            if len(self._data) < end:
                break
            messages.append(marshal.loads(self._data[8:end]))  # noqa: S302 - our own process
            self._data = self._data[end:]
        return messages
