"""The messages between saferun and its keeper, and how they travel through two pipes.

saferun sends commands: any number of `Prepare`, one `Start`, then `Signal`, `Resize` and `Kill` as
they come; when it closes the pipe, or dies, the keeper ends the job. The keeper sends reports:
`Started`, `Exited`, `Ended`, or `Failed` alone where the command could not be executed, and
`Released` whenever an output ends.

A message travels as its length in eight bytes and a marshalled list of its type's name and its
fields. Standard library only.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

HURRIED_DRAIN_S = 2.0  # output waits so long for a slow reader once somebody wants an end
_LENGTH_BYTES = 8


# --- commands --------------------------------------------------------------------------------


class Prepare(NamedTuple):
    """Start a warm process (warm_agent.py) for the attempt to come."""

    python: list[str]  # the launcher's Python and its flags, or the job's
    env: dict[str, str]  # the whole environment that it starts with
    program: str  # the launcher's program, or "-m"; "" for plain python
    argv: list[str]  # the command line that it will show once it is the job
    ignored: list[int]  # the signals that it ignores, as the job will
    ranks: str | None  # the file that lists what ranks import, "" for none, if it forks its ranks
    own_group: bool  # it gets a process group of its own, else it stays in saferun's


class Start(NamedTuple):
    """Run one attempt's command."""

    argv: list[str]
    env: dict[str, str]  # the whole environment
    own_group: bool  # it gets a process group of its own, else it stays in saferun's
    ignored: Sequence[int] = ()  # signals that it ignores
    blocked: Sequence[int] = ()  # signals that it blocks
    nofile: int | None = None  # the soft limit of open files, raised as far as the hard one allows
    cold: str = ""  # why no warm process may become the command; "" where one may
    mark: str = ""  # the environment variable that tells the command why none did; "" for none
    tail_bytes: int = 0  # how much of the end of each stream to keep
    gpu_prefix: str = ""  # who has a path with this beginning open is ended after success, too


class Signal(NamedTuple):
    """Pass a signal on: to the command, or to the ranks that have a handler for it."""

    number: int
    ranks: list[int] | None  # pids that have left a rank's receipt; None: for the command


class Resize(NamedTuple):
    """The terminal may have a new size."""


class Kill(NamedTuple):
    """End the job now."""


# --- reports ---------------------------------------------------------------------------------


class Started(NamedTuple):
    """The command is executed."""

    launcher: int  # its pid
    exact: bool  # no output is lost should the keeper be killed
    cold: str  # why the warm process did not become the command; "" where it did, or none waited


class Released(NamedTuple):
    """The channel of an output has ended: its reader went away, or all writers closed it."""

    outer: int  # 1 or 2


class Exited(NamedTuple):
    """The command has exited, or is about to be killed; what it left is ended after this."""

    lived_s: float
    wait_status: int | None  # as waitpid(2) gives it; None where it has not ended yet


class Ended(NamedTuple):
    """Nothing of the job lives, except what it detached on purpose or what cannot be killed."""

    wait_status: int  # as waitpid(2) gives it
    killed: int  # processes that were left over and were killed
    unkillable: list[int]  # pids
    tails: tuple[bytes, bytes]  # the end of stdout and of stderr
    heads: tuple[bytes, bytes] = (b"", b"")  # the beginning of both
    merged: bool = False  # stdout and stderr are one; the bytes of both count as stdout's
    lingers: bool = False  # the keeper stays: it carries the output of what the job detached


class Failed(NamedTuple):
    """The command could not be executed."""

    reason: str  # the words of strerror(3)
    program: str


Command = Prepare | Start | Signal | Resize | Kill
Report = Started | Released | Exited | Ended | Failed
Message = Command | Report

_TYPES: dict[str, Callable[..., Message]] = {
    kind.__name__: kind
    for kind in (Prepare, Start, Signal, Resize, Kill, Started, Released, Exited, Ended, Failed)
}


# --- the pipes -------------------------------------------------------------------------------


def send(fd: int, message: Message) -> None:
    """Write one message; a reader that went away is no error."""
    data = marshal.dumps([type(message).__name__, *message])
    view = memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        return


def _decode(data: bytes) -> Message:
    name, *fields = marshal.loads(data)  # noqa: S302 - from our own process
    return _TYPES[name](*fields)


class Inbox:
    """Reads messages as they come."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._data = b""
        self._waiting: list[Message] = []

    def wait(self) -> bool:
        """Wait for a message; return whether there is one, False when no more can come."""
        while not self._waiting and not self.closed:
            self._waiting = self._fetch()
        return bool(self._waiting)

    def first(self) -> Message | None:
        """Wait for one message and return it alone; None when no more can come."""
        return self._waiting.pop(0) if self.wait() else None

    def waiting(self) -> list[Message]:
        """Return the messages that came together with the `first`."""
        messages, self._waiting = self._waiting, []
        return messages

    def read(self) -> list[Message]:
        """Read once (blocks if nothing has come) and return the messages that are complete."""
        return self.waiting() + self._fetch()

    def _fetch(self) -> list[Message]:
        data = os.read(self.fd, 1 << 20)
        self.closed = not data
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "little")
            if len(self._data) < end:
                break
            messages.append(_decode(self._data[_LENGTH_BYTES:end]))
            self._data = self._data[end:]
        return messages
