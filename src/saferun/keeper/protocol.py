"""The messages between saferun and its keeper, and their transport through two pipes.

saferun sends commands: any number of `Prepare`, one `Start`, then any `Signal`, `Resize` and
`Kill`. When it closes the pipe, or dies, the keeper ends the job. The keeper sends reports:
`Started`, `Exited`, `Ended`, or only `Failed` if the command could not be executed, and `Released`
whenever an output ends.

A message is its length in eight bytes and a marshalled list of its type's name and its fields. This
module uses only the standard library.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Mapping, Sequence

from saferun.keeper.named_tuple import NamedTuple

HURRIED_DRAIN_S = 2.0  # longest wait of output for a slow reader once an end is requested
_LENGTH_BYTES = 8


# --- commands --------------------------------------------------------------------------------


class Prepare(NamedTuple):
    """Start a warm process (warm_agent.py) for the next attempt."""

    python: list[str]  # the launcher's Python and its flags, or the job's
    env: dict[str, str]  # the whole environment of its start
    program: str  # the launcher's program, or "-m"; "" for plain python
    argv: list[str]  # the command line that it shows once it is the job
    ignored: list[int]  # signals that it ignores, as the job will
    ranks: str | None  # the file that lists the ranks' imports ("": no list), if it forks its ranks
    own_group: bool  # it gets its own process group; otherwise it stays in saferun's


class Start(NamedTuple):
    """Run one attempt's command."""

    argv: list[str]
    env: dict[str, str]  # the whole environment
    own_group: bool  # it gets its own process group; otherwise it stays in saferun's
    ignored: Sequence[int] = ()  # signals that it ignores
    blocked: Sequence[int] = ()  # signals that it blocks
    # Soft limits by name ("nofile", as in resource.RLIMIT_NOFILE), raised up to the hard ones.
    limits: Mapping[str, int] = {}
    cold: str = ""  # why no warm process may become the command; "" if one may
    mark: str = ""  # variable that tells the command why none did; "" for none
    tail_bytes: int = 0  # how many bytes of the end of each stream to keep
    gpu_prefix: str = ""  # processes with an open path that begins so are ended after success, too


class Signal(NamedTuple):
    """Pass a signal on: to the command, or to the ranks with a handler for it."""

    number: int
    ranks: list[int] | None  # pids that left a rank's receipt; None: for the command


class Resize(NamedTuple):
    """The terminal may have a new size."""


class Kill(NamedTuple):
    """End the job now."""


# --- reports ---------------------------------------------------------------------------------


class Started(NamedTuple):
    """The command was executed."""

    launcher: int  # the command's pid
    exact: bool  # no output is lost if the keeper is killed
    cold: str  # why the warm process did not become the command; "" if it did, or none waited


class Released(NamedTuple):
    """The channel of an output has ended: its reader has gone, or all writers closed it."""

    outer: int  # 1 or 2


class Exited(NamedTuple):
    """The command has exited, or is about to be killed; its leftovers are ended next."""

    lived_s: float
    wait_status: int | None  # as from waitpid(2); None if it has not ended yet


class Ended(NamedTuple):
    """Nothing of the job lives, except detached processes and those that cannot be killed."""

    wait_status: int  # as from waitpid(2)
    killed: int  # number of leftover processes that were killed
    unkillable: list[int]  # pids
    tails: tuple[bytes, bytes]  # the end of stdout and of stderr
    heads: tuple[bytes, bytes] = (b"", b"")  # the beginning of both
    merged: bool = False  # stdout and stderr are one; the bytes of both count as stdout's
    lingers: bool = False  # the keeper stays: it carries the output of what the job detached


class Failed(NamedTuple):
    """The command could not be executed."""

    reason: str  # text of strerror(3)
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
    """Write one message; it is no error if the reader has gone."""
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
    """Read messages as they arrive."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._data = b""
        self._waiting: list[Message] = []

    def wait(self) -> bool:
        """Wait for a message; return False if no more can come."""
        while not self._waiting and not self.closed:
            self._waiting = self._fetch()
        return bool(self._waiting)

    def first(self) -> Message | None:
        """Wait for one message and return only that; None if no more can come."""
        return self._waiting.pop(0) if self.wait() else None

    def waiting(self) -> list[Message]:
        """Return the messages that arrived together with the `first`."""
        messages, self._waiting = self._waiting, []
        return messages

    def read(self) -> list[Message]:
        """Read once (blocking if there is nothing) and return the complete messages."""
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
