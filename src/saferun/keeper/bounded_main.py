"""The program of a process that runs one command for a limited time and leaves nothing of it.

    bounded(SECONDS, ARGV...)   a line on stdin becomes the command's stdin; a report goes to stdout

The end of stdin ends the command: saferun has died, or no longer waits for it. Like keeper_main.py,
this module uses only the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import time

from saferun.base import prctl
from saferun.keeper import process_tree, protocol
from saferun.keeper.job import KEEPER_IGNORES, start_program

_LOOK_S = 0.05  # between two checks whether the command has ended
_KEPT_BYTES = 4096  # bytes kept of the end of its output


def bounded(limit_s: float, *argv: str) -> None:
    """Run a command; report why it failed, or nothing. This process leads a session.

    Args:
        limit_s: seconds after which the command, and all that it started, is killed.
        argv: the command.
    """
    prctl.become_subreaper()
    for number in KEEPER_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with open(0, "rb", closefd=False) as stdin:
        line = stdin.readline()
    lifeline = os.dup(0)
    file = os.memfd_create("saferun-event")
    os.write(file, line)
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.write(1, _run(list(argv), lifeline, limit_s).encode("utf-8", "replace"))


def _run(argv: list[str], lifeline: int, limit_s: float) -> str:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    family = process_tree.Family()
    program = protocol.Start(argv, dict(os.environ), own_group=True)
    try:
        family.first = start_program(program, (writing, writing))
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    os.close(writing)
    limit = time.monotonic() + limit_s
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    output, trouble = b"", ""
    while family.reap() and family.status is None and not trouble:
        if poller.poll(_LOOK_S * 1000):
            trouble = "was ended with the run"
        elif time.monotonic() >= limit:
            trouble = f"did not end within {limit_s:g} s"
        output = _read(reading, output)
    family.end()
    output = _read(reading, output)
    last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
    trouble = trouble or _end(family.status or 0)
    return f"{trouble}: {last}" if trouble and last else trouble


def _read(descriptor: int, output: bytes) -> bytes:
    """Return the end of the output, with all that can be read now."""
    try:
        while piece := os.read(descriptor, 1 << 16):
            output = (output + piece)[-_KEPT_BYTES:]
    except BlockingIOError:
        pass
    return output


def _end(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return f"ended with status {code}" if code else ""
