"""The relay of a job's output: every byte, unchanged, without delay; both ends of it are kept.

Descriptors 1 and 2 have a channel each; where both lead to one terminal or one pipe they share a
channel, since two would lose the order of the lines. A terminal stays a terminal (a raw pty of
ours in front of it), a pipe stays a pipe (enlarged), a regular file is handed to the job itself
and its end is read back. A slow reader slows the job. When a reader goes away we close our end, so
that the job gets the EPIPE or EIO that it would have got without us.

It runs in the keeper: standard library only, and no import that would delay the start of a job.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import select
import stat
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 64 * 1024  # kept of the beginning: it shows from which step a job went on
PIPE_BYTES = 1 << 20  # the largest that an unprivileged user may ask for by default
_SET_PIPE_BYTES = getattr(fcntl, "F_SETPIPE_SZ", 1031)  # in fcntl since Python 3.10
_TIOCGDEV = 0x80045432  # which terminal stands behind /dev/tty or /dev/console
_FLUSH_BYTES = 4 << 20  # after so much a channel is flushed although somebody goes on writing
# A read of a terminal returns 4 KiB at most: after one of this size there is probably more.
_FULL_READ_BYTES, _GATHER_BYTES = 2048, 1 << 16
LINE_S, LINE_BYTES = 0.2, 1 << 16  # how long, and how much, of a line is waited for
_READER_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL

TERMINAL, PIPE, FILE, DEVICE = "terminal", "pipe", "file", "device"


def kind(fd: int) -> str:
    """Return what `fd` is: a terminal, a pipe (or socket, or /dev/null), a file, a device."""
    mode = os.fstat(fd)
    if os.isatty(fd):
        return TERMINAL
    if stat.S_ISREG(mode.st_mode):
        return FILE
    null = stat.S_ISCHR(mode.st_mode) and mode.st_rdev == os.makedev(1, 3)
    return PIPE if null or stat.S_ISFIFO(mode.st_mode) or stat.S_ISSOCK(mode.st_mode) else DEVICE


def same(one: int, other: int) -> bool:
    """Return whether two descriptors lead to one terminal, pipe or file."""
    kinds = kind(one), kind(other)
    if kinds == (TERMINAL, TERMINAL):
        return _terminal(one) == _terminal(other)
    return kinds[0] == kinds[1] and os.path.sameopenfile(one, other)


def _terminal(fd: int) -> bytes:
    try:
        return fcntl.ioctl(fd, _TIOCGDEV, bytes(4))
    except OSError:
        return b"%d" % os.fstat(fd).st_rdev


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


class Channel:
    """Carries what the job writes to `inner` to the descriptor `outer`.

    Args:
        outer: a terminal or a pipe.
        tail_bytes: how much of the end to keep.
        notify: a descriptor that gets a zero byte when this is flushed or done.
        shared: other jobs write there, too: lines that come within LINE_S stay whole.

    Raises:
        OSError: no pipe or pseudo-terminal can be had.
    """

    def __init__(self, outer: int, tail_bytes: int, notify: int, shared: bool = False) -> None:
        self.outer = outer
        self._notify = notify
        self._shared = shared
        self._rest = b""  # of a shared output: the beginning of a line
        self.tail = Tail(tail_bytes)
        self.is_terminal = kind(outer) == TERMINAL
        self._ours, self.inner = _pty(outer) if self.is_terminal else _pipe(outer)
        os.set_blocking(self._ours, False)  # no need to poll while the job is faster than we are
        self._watch_reader = self.is_terminal or not _named_fifo(outer)
        self._wake, self._waker = os.pipe()
        self._flushing = -1  # bytes carried since a flush was asked for; -1: nobody asked
        self.flushed = False
        self.done = False  # the job closed its end, or the reader went away

    def start(self) -> None:
        """Carry from now on, in a thread; the job must have `inner` by now, which we close."""
        os.close(self.inner)
        _thread.start_new_thread(self._run, ())

    def flush(self) -> None:
        """Ask for `flushed`, which becomes true when all that has been written is carried."""
        self.flushed, self._flushing = False, 0
        os.write(self._waker, b"f")

    def resize(self) -> None:
        """Give the job's terminal the window size of ours."""
        if self.is_terminal and not self.done:
            _copy_size(self.outer, self._ours)

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
        buffer = bytearray(CHUNK_BYTES)
        view = memoryview(buffer)
        poller = select.poll()
        poller.register(self._ours, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        if self._watch_reader:
            poller.register(self.outer, 0)
        while True:
            try:
                count = os.readv(self._ours, [buffer])
            except BlockingIOError:
                if not self._wait(poller):
                    return
                continue
            if not count:
                return
            if self.is_terminal:
                count = self._gather(view, count)
            self._pass_on(view[:count])

    def _pass_on(self, chunk: memoryview) -> None:
        """Deliver a chunk; of a shared output only as far as the last end of a line."""
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

    def _gather(self, view: memoryview, count: int) -> int:
        """Read on while a terminal returns full reads; return how many bytes are in `view`."""
        last = count
        while last >= _FULL_READ_BYTES and count < _GATHER_BYTES:
            try:
                last = os.readv(self._ours, [view[count:]])
            except OSError:  # nothing more now, or the end: the next read shows which
                break
            count += last
        return count

    def _wait(self, poller: select.poll) -> bool:
        """Wait for the job to write; return whether there is still a reader."""
        ready = dict(poller.poll(LINE_S * 1000 if self._rest else None))
        if self._rest and self._ours not in ready:
            self._pass_rest()
        if ready.get(self.outer, 0) & _READER_GONE:
            return False
        if self._wake in ready and self._ours not in ready:
            os.read(self._wake, 64)  # a flush was asked for, and all has been carried
            self._report_flushed()
        return True

    def _deliver(self, chunk: memoryview) -> None:
        self.tail.add(chunk)
        count = len(chunk)
        while chunk:
            try:
                chunk = chunk[os.write(self.outer, chunk) :]
            except BlockingIOError:  # somebody has made the descriptor non-blocking
                select.select([], [self.outer], [])
        if self._flushing >= 0:
            self._flushing += count
            if self._flushing > _FLUSH_BYTES:
                self._report_flushed()

    def _report_flushed(self) -> None:
        self.flushed, self._flushing = True, -1
        os.write(self._notify, b"\0")


class Streams:
    """What the job gets as descriptors 1 and 2, and the channels behind them.

    Args:
        tail_bytes: how much of the end of each stream to keep.
        notify: a descriptor that gets a zero byte when a channel is flushed or done.
        shared: other jobs write to the same output.
    """

    def __init__(self, tail_bytes: int, notify: int, shared: bool = False) -> None:
        self._notify = notify
        self._shared = shared
        self._started = False
        self.merged = same(1, 2)
        self.channels: list[Channel] = []
        self.files = [1, 2]  # what becomes descriptors 1 and 2 of the job
        self._tails: list[Tail | FileTail | None] = [None, None]
        for place, fd in enumerate((1,) if self.merged else (1, 2)):
            self._open(place, fd, tail_bytes)
        if self.merged and self.channels:
            self.files[1] = self.files[0]

    def _open(self, place: int, fd: int, tail_bytes: int) -> None:
        what = kind(fd)
        if what in (TERMINAL, PIPE) or (what == FILE and self._shared):
            try:
                channel = Channel(fd, tail_bytes, self._notify, self._shared)
            except OSError:  # no pseudo-terminal left: a job without a kept tail beats none
                return
            self.channels.append(channel)
            self.files[place], self._tails[place] = channel.inner, channel.tail
        elif what == FILE:
            self._tails[place] = FileTail(fd, tail_bytes)

    def renew(self, tail_bytes: int) -> None:
        """Update what may have changed since these were made: file offsets, the window's size."""
        for tail in self._tails:
            if tail:
                tail.limit = tail_bytes
            if isinstance(tail, FileTail):
                tail.begin()
        self.resize()

    def start(self) -> None:
        """Begin to carry, unless begun already; call it when the job has its descriptors."""
        if not self._started:
            self._started = True
            for channel in self.channels:
                channel.start()

    def resize(self) -> None:
        """Copy the terminal's window size to the job's."""
        for channel in self.channels:
            channel.resize()

    def flush(self) -> None:
        """Ask for all that has been written; `settled` becomes true when it is carried."""
        for channel in self.channels:
            channel.flush()

    def settled(self) -> bool:
        """Return whether all that was written before `flush` is carried, or nobody reads it."""
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


def _pipe(outer: int) -> tuple[int, int]:
    ours, inner = os.pipe()
    for end in (inner, outer):
        try:
            fcntl.fcntl(end, _SET_PIPE_BYTES, PIPE_BYTES)
        except OSError:  # a socket, /dev/null, or this user's share of pipe memory is used up
            continue
    return ours, inner


def _pty(outer: int) -> tuple[int, int]:
    ours, inner = os.openpty()
    modes = termios.tcgetattr(inner)
    modes[0] = modes[1] = modes[3] = 0  # raw: the real terminal does all processing
    termios.tcsetattr(inner, termios.TCSANOW, modes)
    _copy_size(outer, ours)
    return ours, inner


def _copy_size(source: int, target: int) -> None:
    try:
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
    except OSError:  # the terminal is gone
        return


def _named_fifo(fd: int) -> bool:
    # A FIFO with a name may get another reader later; one without a name never will.
    return stat.S_ISFIFO(os.fstat(fd).st_mode) and not os.readlink(
        f"/proc/self/fd/{fd}"
    ).startswith("pipe:")
