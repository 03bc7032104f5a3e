"""Receive signals as data: blocked, and read from a descriptor together with where they came from.

`signal.signal` would tell the number only. Whether the kernel sent it (a key at the terminal, which
reaches the whole foreground group) or a process did decides whether a child in our own group must
still be told.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

_RECORD_BYTES = 128  # struct signalfd_siginfo: signo, errno, code, pid, …
_SI_KERNEL = 0x80


class Signals:
    """Between `with` and its end the given signals are read from `fd` instead of acting.

    Enter it in the main thread before other threads start: a thread that does not block them
    would still be killed by them. Signals that are ignored when it is entered stay ignored.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.wanted = frozenset(
            number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
        )
        self.blocked_before: set[int] = set()
        self.fd = -1

    def __enter__(self) -> Signals:
        self.blocked_before = set(signal.pthread_sigmask(signal.SIG_BLOCK, self.wanted))
        self.fd = _signalfd(self.wanted)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_before)

    def read(self) -> list[tuple[int, bool]]:
        """Return (number, whether the kernel sent it) of what has come; empty if nothing has."""
        try:
            data = os.read(self.fd, 64 * _RECORD_BYTES)
        except BlockingIOError:
            return []
        records = [data[at : at + 12] for at in range(0, len(data), _RECORD_BYTES)]
        fields = [[int.from_bytes(r[i : i + 4], "little") for i in (0, 8)] for r in records]
        return [(number, code == _SI_KERNEL) for number, code in fields]


def _signalfd(numbers: Iterable[int]) -> int:
    # sigset_t: 1024 bits in C libraries, of which the kernel reads the first 64.
    mask = sum(1 << number - 1 for number in numbers).to_bytes(128, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.signalfd(-1, ctypes.c_char_p(mask), os.O_CLOEXEC | os.O_NONBLOCK))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
