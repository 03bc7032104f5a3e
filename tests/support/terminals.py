"""A terminal with a person at it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from pathlib import Path

from helpers import DEADLINE_S, children

QUIET_S = 20  # after which a shell that shows its prompt and has no child does nothing more
BASH = ("bash", "--norc", "--noprofile", "--noediting", "-i")


class Terminal:
    """An interactive shell in a pty, bash unless another is given."""

    def __init__(self, environment: dict[str, str], shell: tuple[str, ...] = BASH) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.execvpe(shell[0], shell, {"TERM": "dumb", **environment, "PS1": "READY$ "})
        self.seen = b""
        self.expect(rb"READY\$ ")

    def type(self, text: str, *answers: bytes) -> None:
        """Type keys, and expect what comes after them, one by one."""
        os.write(self.fd, text.encode())
        for pattern in answers:
            self.expect(pattern)

    def expect(self, pattern: bytes, limit_s: float = DEADLINE_S) -> re.Match[bytes]:
        """Return the first match in what was not matched before; forget all up to its end."""
        limit = time.monotonic() + limit_s
        while not (match := re.search(pattern, self.seen)):
            idle = not select.select([self.fd], [], [], QUIET_S)[0]
            if not idle:
                self.seen += os.read(self.fd, 65536)
            over = idle and self.seen.endswith(b"READY$ ") and not children(self.pid)
            assert not over, f"no {pattern!r} in {self.seen[-2000:]!r}, and nothing runs"
            assert time.monotonic() < limit, f"no {pattern!r} in {self.seen[-2000:]!r}"
        self.seen = self.seen[match.end() :]
        return match

    def has_job(self) -> bool:
        """Return whether a job of the shell's is in the foreground, which gets the keys."""
        return os.tcgetpgrp(self.fd) != os.getpgid(self.pid)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)

    def end(self) -> None:
        self.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def start(command: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, int]:
    """Start a command as the foreground of a terminal of its own; return (pid, terminal)."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environ)
    return pid, fd


def read_all(fd: int) -> str:
    """Return what a terminal shows until its other side is closed."""
    data = b""
    while True:
        assert select.select([fd], [], [], DEADLINE_S)[0], "a process still has the terminal"
        try:
            piece = os.read(fd, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        data += piece
    return data.decode()
