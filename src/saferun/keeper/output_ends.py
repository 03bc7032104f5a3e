"""Our outputs, and the pipes and terminals that the job gets instead.

saferun creates them and keeps the reading ends, too: bytes that a killed keeper left in them are
not lost, and no writer gets an EPIPE because of us. The keeper copies the output.

This module uses only the standard library, since the keeper uses it, too.
"""

from __future__ import annotations

import fcntl
import os
import stat
import termios
from collections.abc import Iterable, Sequence

from saferun.keeper.named_tuple import NamedTuple

PIPE_BYTES = 1 << 20  # most that an unprivileged user may request by default
_SET_PIPE_BYTES = getattr(fcntl, "F_SETPIPE_SZ", 1031)  # in fcntl since Python 3.10
_TIOCGDEV = 0x80045432  # returns the terminal behind /dev/tty or /dev/console

TERMINAL, PIPE, FILE, DEVICE = "terminal", "pipe", "file", "device"


class OutputPipes(NamedTuple):
    """The descriptors between the job and one of our outputs; -1 for an absent one."""

    outer: int  # our output: 1 or 2
    ours: int  # from which the job's output is read
    inner: int  # the one that the job gets
    # A pipe between a pseudo-terminal and our terminal: the kernel moves bytes in one step only if
    # one end is a pipe.
    stage_out: int = -1
    stage_in: int = -1

    def kept(self) -> OutputPipes:
        """Close the descriptors that only the job and the keeper need; return the rest."""
        for fd in (self.inner, self.stage_in):
            _close(fd)
        for fd in (self.ours, self.stage_out):
            if fd >= 0:
                os.set_inheritable(fd, False)
        return self._replace(inner=-1, stage_in=-1)

    def close(self) -> None:
        """Close all open descriptors except our output."""
        for fd in self[1:]:
            _close(fd)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def make(*, shared: bool) -> list[OutputPipes]:
    """Create ends for our stdout and stderr; one pair for both if they are the same.

    The job gets a regular file or a device directly.

    Args:
        shared: other jobs write there, too, so the job does not get a file directly.
    """
    kinds = (TERMINAL, PIPE, FILE) if shared else (TERMINAL, PIPE)
    found = []
    for fd in (1,) if same(1, 2) else (1, 2):
        if kind(fd) in kinds:
            try:
                found.append(_ends_of(fd))
            except OSError:  # no pseudo-terminal left: a job without a tail is better than none
                continue
    return found


def _ends_of(outer: int) -> OutputPipes:
    if kind(outer) != TERMINAL:
        return OutputPipes(outer, *_pipe(outer))
    stage = os.pipe()
    try:
        return OutputPipes(outer, *_pty(outer), *stage)
    except OSError:
        for fd in stage:
            os.close(fd)
        raise


def encode(ends: Iterable[OutputPipes]) -> str:
    """Return ends as one command-line argument."""
    return ",".join(str(fd) for one in ends for fd in one)


def decode(text: str) -> Sequence[OutputPipes]:
    """Return the ends from `encode`'s result; programs started here do not inherit them."""
    numbers = [int(word) for word in text.split(",") if word]
    size = len(OutputPipes._fields)
    for fd in numbers:
        if fd > 2:
            os.set_inheritable(fd, False)
    return [OutputPipes(*numbers[at : at + size]) for at in range(0, len(numbers), size)]


def kind(fd: int) -> str:
    """Return the type of `fd`: a terminal, a pipe (or socket, or /dev/null), a file, a device."""
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


def _pipe(outer: int) -> tuple[int, int]:
    ours, inner = os.pipe()
    for end in (inner, outer):
        enlarge(end)
    return ours, inner


def enlarge(pipe: int) -> None:
    """Let a pipe hold PIPE_BYTES if the kernel allows it."""
    try:
        fcntl.fcntl(pipe, _SET_PIPE_BYTES, PIPE_BYTES)
    except OSError:  # a socket, /dev/null, or this user's pipe memory is used up
        return


def _pty(outer: int) -> tuple[int, int]:
    ours, inner = os.openpty()
    modes = termios.tcgetattr(inner)
    modes[0] = modes[1] = modes[3] = 0  # raw: the real terminal does all processing
    termios.tcsetattr(inner, termios.TCSANOW, modes)
    copy_size(outer, ours)
    return ours, inner


def copy_size(source: int, target: int) -> None:
    """Give a terminal the window size of another one."""
    try:
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
    except OSError:  # the terminal is gone
        return
