"""Copy a job's output: every byte, unchanged, without delay; keep both ends of it.

Descriptors 1 and 2 have a channel each. If both lead to one terminal or one pipe they share a
channel, since two would lose the order of the lines. A terminal stays a terminal (with our raw pty
in front of it), a pipe stays a pipe (enlarged), and the job gets a regular file directly, whose end
is read back. A slow reader slows the job. When a reader goes away we close our end, so the job gets
the EPIPE or EIO that it would get without us.

It runs in the keeper: it uses only the standard library, and no import that would delay the start
of a job.
"""

from __future__ import annotations

import _thread
import os
import select
import stat
from collections.abc import Sequence

from saferun.keeper.mover import mover
from saferun.keeper.output_ends import FILE, TERMINAL, OutputPipes, copy_size, kind, same
from saferun.keeper.output_tail import MEMORY, FileTail, Tail

CHUNK_BYTES = 1 << 20
_FLUSH_BYTES = 4 << 20  # after so many bytes a channel counts as flushed even if writing continues
LINE_S, LINE_BYTES = 0.2, 1 << 16  # time and size up to which the end of a line is awaited
_READER_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


class Channel:
    """Copy the job's output to one of our outputs.

    Args:
        ends: the ends of the pipe or terminal between them.
        tail_bytes: how many bytes of the end to keep.
        notify: descriptor that gets a zero byte when this is flushed or done.
        shared: other jobs write there, too: lines that come within LINE_S stay whole.
    """

    def __init__(
        self, ends: OutputPipes, tail_bytes: int, notify: int, shared: bool = False
    ) -> None:
        self.outer, self._ours, self.inner = ends.outer, ends.ours, ends.inner
        self._notify = notify
        self._shared = shared
        self._rest = b""  # incomplete line of a shared output
        self.tail = Tail(tail_bytes, f"{MEMORY}{self.outer}")
        self.is_terminal = kind(self.outer) == TERMINAL
        os.set_blocking(self._ours, False)  # no poll is needed while the job is faster than we are
        self._mover = None if shared else mover(ends)
        self._buffer = memoryview(b"")
        self._watch_reader = self.is_terminal or not _named_fifo(self.outer)
        self._wake, self._waker = os.pipe()
        self._flushing = -1  # bytes copied since a flush was requested; -1: no request
        self.flushed = False
        self.done = False  # the job closed its end, or the reader has gone

    @property
    def exact(self) -> bool:
        """Return whether nothing is lost if this process dies."""
        return self._mover is not None

    def start(self) -> None:
        """Start copying in a thread.

        Raises:
            RuntimeError: no thread can be started.
        """
        _thread.start_new_thread(self._run, ())

    def release(self) -> None:
        """Close `inner`, which the job now has."""
        os.close(self.inner)

    def flush(self) -> None:
        """Request `flushed`, which becomes true when all written bytes are copied."""
        self.flushed, self._flushing = False, 0
        os.write(self._waker, b"f")

    def resize(self) -> None:
        """Give the job's terminal our window size."""
        if self.is_terminal and not self.done:
            copy_size(self.outer, self._ours)

    def _run(self) -> None:
        try:
            try:
                self._carry()
            finally:
                self._pass_rest()
        except OSError:
            return  # EIO: the job closed its last terminal descriptor; EPIPE: our reader is gone
        finally:
            self.done = True
            os.close(self._ours)
            os.write(self._notify, b"\0")

    def _carry(self) -> None:
        self._buffer = memoryview(bytearray(0 if self._mover else CHUNK_BYTES))
        poller = select.poll()
        poller.register(self._ours, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        if self._watch_reader:
            poller.register(self.outer, 0)
        going_on = True
        while going_on:
            chunk = self._next()
            if chunk is None:
                going_on = self._wait(poller)
            elif self._mover:
                self.tail.add(memoryview(chunk))
                self._mover.move(len(chunk))
                self._count(len(chunk))
                going_on = bool(chunk)
            else:
                self._pass_on(memoryview(chunk))
                going_on = bool(chunk)

    def _next(self) -> bytes | memoryview | None:
        """Return the job's next bytes; empty at the end, None if there are none now."""
        try:
            if self._mover:
                return self._mover.peek()
            count = os.readv(self._ours, [self._buffer])
        except BlockingIOError:
            return None
        return self._buffer[:count]

    def _pass_on(self, chunk: memoryview) -> None:
        """Write a chunk; for a shared output only up to the last end of a line."""
        if not self._shared:
            self._deliver(chunk)
            return
        data = self._rest + bytes(chunk)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest = data[end:]
        if len(self._rest) > LINE_BYTES:
            end, self._rest = len(data), b""
        self._deliver(memoryview(data)[:end])

    def _pass_rest(self) -> None:
        rest, self._rest = self._rest, b""
        self._deliver(memoryview(rest))

    def _wait(self, poller: select.poll) -> bool:
        """Wait for the job to write; return whether there is still a reader."""
        ready = dict(poller.poll(LINE_S * 1000 if self._rest else None))
        if self._rest and self._ours not in ready:
            self._pass_rest()
        if ready.get(self.outer, 0) & _READER_GONE:
            return False
        if self._wake in ready and self._ours not in ready:
            os.read(self._wake, 64)  # a flush was requested, and everything is copied
            self._report_flushed()
        return True

    def _deliver(self, chunk: memoryview) -> None:
        self.tail.add(chunk)
        count = len(chunk)
        while chunk:
            try:
                chunk = chunk[os.write(self.outer, chunk) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                select.select([], [self.outer], [])
        self._count(count)

    def _count(self, count: int) -> None:
        if self._flushing >= 0:
            self._flushing += count
            if self._flushing > _FLUSH_BYTES:
                self._report_flushed()

    def _report_flushed(self) -> None:
        self.flushed, self._flushing = True, -1
        os.write(self._notify, b"\0")


class Streams:
    """The job's descriptors 1 and 2, and the channels behind them.

    Args:
        ends: the ends of the channels.
        tail_bytes: how many bytes of the end of each stream to keep.
        notify: a descriptor that gets a zero byte when a channel is flushed or done.
        shared: other jobs write to the same output.
    """

    def __init__(
        self, ends: Sequence[OutputPipes], tail_bytes: int, notify: int, shared: bool = False
    ) -> None:
        self._released = False
        self.merged = same(1, 2)
        self.channels = [Channel(one, tail_bytes, notify, shared) for one in ends]
        self.files = [1, 2]  # these become descriptors 1 and 2 of the job
        self._tails: list[Tail | FileTail | None] = [None, None]
        for channel in self.channels:
            self.files[channel.outer - 1] = channel.inner
            self._tails[channel.outer - 1] = channel.tail
        for place, fd in enumerate((1,) if self.merged else (1, 2)):
            if self._tails[place] is None and kind(fd) == FILE:
                self._tails[place] = FileTail(fd, tail_bytes)
        if self.merged and self.channels:
            self.files[1] = self.files[0]

    @property
    def exact(self) -> bool:
        """Return whether nothing in the channels is lost if this process dies."""
        return all(channel.exact for channel in self.channels)

    def renew(self, tail_bytes: int) -> None:
        """Update values that may have changed since the creation: file offsets, window size."""
        for tail in self._tails:
            if tail:
                tail.limit = tail_bytes
            if isinstance(tail, FileTail):
                tail.begin()
        self.resize()

    def start(self) -> None:
        """Start copying before there is a job: the system may refuse a thread.

        Raises:
            RuntimeError: no thread can be started.
        """
        for channel in self.channels:
            channel.start()

    def release(self) -> None:
        """Leave the job's ends to the job, once; call it when the job has them."""
        if not self._released:
            self._released = True
            for channel in self.channels:
                channel.release()

    def resize(self) -> None:
        """Copy our terminal's window size to the job's."""
        for channel in self.channels:
            channel.resize()

    def flush(self) -> None:
        """Request that all written bytes are copied; `settled` then becomes true."""
        for channel in self.channels:
            channel.flush()

    def settled(self) -> bool:
        """Return whether all bytes written before `flush` are copied, or nobody reads them."""
        return all(channel.done or channel.flushed for channel in self.channels)

    def done(self) -> bool:
        """Return whether no channel can carry anything more."""
        return all(channel.done for channel in self.channels)

    def tails(self) -> tuple[bytes, bytes]:
        """Return the end of stdout and of stderr; a shared channel counts as stdout."""
        one, two = (tail.read() if tail else b"" for tail in self._tails)
        return one, two

    def heads(self) -> tuple[bytes, bytes]:
        """Return the beginning of stdout and of stderr."""
        one, two = (tail.head() if tail else b"" for tail in self._tails)
        return one, two


def _named_fifo(fd: int) -> bool:
    # A named FIFO may get another reader later; an unnamed one will not.
    return stat.S_ISFIFO(os.fstat(fd).st_mode) and not os.readlink(
        f"/proc/self/fd/{fd}"
    ).startswith("pipe:")
