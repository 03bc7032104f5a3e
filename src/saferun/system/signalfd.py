"""Signals as data: they are blocked, and read from a descriptor together with their sender.

`signal.signal` gives only the number. The sender decides whether a child in our own process group
must still get the signal: for a key at the terminal the kernel sends it to the whole foreground
group; a process sends it only to us. Slurm signals every process of a job step (slurmstepd does so
by itself, for scancel and for srun): the child already has the signal, and torchrun aborts its
shutdown when it gets a second one.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

from saferun.base import proc

_RECORD_BYTES = 128  # struct signalfd_siginfo: signo, errno, code, pid, …
_SI_KERNEL = 0x80


class Signals:
    """A context in which the given signals are read from `fd` instead of taking effect.

    Enter it in the main thread before other threads start: the signals would still kill a thread
    that does not block them. Signals that are already ignored stay ignored.
    """

    KERNEL, STEP = "kernel", "step"

    def __init__(self, numbers: Iterable[int]) -> None:
        self.wanted = frozenset(
            number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
        )
        self.blocked_before: set[int] = set()
        self.fd = -1
        self._is_interrupted = False  # by a SIGINT that our parent may repeat

    def __enter__(self) -> Signals:
        self.blocked_before = set(signal.pthread_sigmask(signal.SIG_BLOCK, self.wanted))
        self.fd = _signalfd(self.wanted)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_before)

    def read(self) -> list[tuple[int, str]]:
        """Return number and sender of each signal that has arrived, without waiting.

        The sender is KERNEL, STEP (Slurm: all processes of our step have it), or "". A SIGINT is
        left out if our parent repeats one that we have, as a script's trap may do.
        """
        try:
            data = os.read(self.fd, 64 * _RECORD_BYTES)
        except BlockingIOError:
            return []
        records = [data[at : at + 16] for at in range(0, len(data), _RECORD_BYTES)]
        fields = [[int.from_bytes(r[i : i + 4], "little") for i in (0, 8, 12)] for r in records]
        return [
            (number, self._sender(code, pid))
            for number, code, pid in fields
            if number != signal.SIGINT or not self._is_repeated(code, pid)
        ]

    def _is_repeated(self, code: int, pid: int) -> bool:
        # A shell whose trap passes the signal on does not know whether the key has reached the
        # whole group.
        from_parent = code != _SI_KERNEL and pid == os.getppid()
        repeated = from_parent and self._is_interrupted
        self._is_interrupted = not from_parent
        return repeated

    def _sender(self, code: int, pid: int) -> str:
        if code == _SI_KERNEL:
            return self.KERNEL
        return self.STEP if proc.data(f"/proc/{pid}/comm") == b"slurmstepd\n" else ""


def _signalfd(numbers: Iterable[int]) -> int:
    # sigset_t has 1024 bits in C libraries; the kernel reads the first 64.
    mask = sum(1 << number - 1 for number in numbers).to_bytes(128, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.signalfd(-1, ctypes.c_char_p(mask), os.O_CLOEXEC | os.O_NONBLOCK))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
