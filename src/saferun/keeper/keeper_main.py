"""The program of a keeper's process.

    under_saferun(ENDS, False, IN, OUT)   commands come in on IN, reports go out on OUT

It uses only the standard library, since it is a process without site-packages, and imports only
this room and `base`.
"""

from __future__ import annotations

import os
import signal

from saferun.base import prctl
from saferun.keeper import output_ends, output_relay, protocol
from saferun.keeper.job import KEEPER_IGNORES
from saferun.keeper.keeper import Keeper


def _set_up() -> tuple[int, int]:
    """Ignore all signals but SIGCHLD; return both ends of the pipe that reports it."""
    prctl.set_name(b"saferun-keeper")
    prctl.become_subreaper()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in KEEPER_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _no_op)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return reading, writing


def _no_op(number: int, frame: object) -> None:
    """Do nothing: the number arrives through the wake-up descriptor."""


def under_saferun(ends: str, shared: bool, commands: int, reports: int, *held: int) -> None:
    """Run the attempt that arrives on `commands` to its end; the process ends with it.

    Args:
        ends: pipes and terminals between the job and our output (`output_ends.encode`).
        shared: other jobs write to the same output.
        commands: descriptor to read commands from.
        reports: descriptor to write reports to.
        held: descriptors that stay open only in this process until nothing of the job lives.
    """
    for fd in (commands, reports, *held):
        os.set_inheritable(fd, False)
    wake, notify = _set_up()
    inbox = protocol.Inbox(commands)
    found = output_ends.decode(ends)
    if inbox.wait():
        streams = output_relay.Streams(found, 0, notify, shared)
        Keeper(streams, inbox, reports, held, wake).serve()
    os._exit(0)  # there may be threads that are stuck in a write
