"""Signals as data: who sent them."""

import os
import pty
import signal
import sys

READS = """
import select, signal
from saferun.system.signalfd import Signals
with Signals([signal.SIGINT, signal.SIGTERM]) as signals:
    print("up", flush=True)
    poller = select.poll()
    poller.register(signals.fd, select.POLLIN)
    while True:
        poller.poll()
        for number, sender in signals.read():
            print(f"<{number} {sender}>", flush=True)
"""


def test_a_parent_that_repeats_a_key_is_not_heard_and_one_that_speaks_for_itself_is():
    """The parent is this process; SIGTERM after each of its signals tells when that is read."""
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", READS])
    try:
        heard = read_to(terminal, b"up")
        os.write(terminal, b"\x03")
        heard = read_to(terminal, b"<2 kernel>")
        for _ in range(2):
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            heard += read_to(terminal, b"<15 >")
        assert heard.count(b"<2 >") == 1
        assert heard.index(b"<2 >") > heard.index(b"<15 >")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def read_to(terminal: int, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        seen += os.read(terminal, 4096)
    return seen
