"""After a keeper's death, end the job and copy the rest of its output.

The job's processes become our children, and we hold the reading ends of its pipes.
"""

from __future__ import annotations

import os
import select
import signal
import time

from saferun.keeper import process_tree, protocol
from saferun.keeper.output_ends import OutputPipes
from saferun.keeper.output_tail import Tail
from saferun.supervise.attempt.attempt_life import AttemptLife
from saferun.supervise.attempt.attempt_values import Observer
from saferun.supervise.ready.keeper_pool import Standby
from saferun.system.signalfd import Signals

_PIECE_BYTES = select.PIPE_BUF  # a write of this size does not block if poll(2) allows one


def take_over(
    life: AttemptLife, standby: Standby, observer: Observer, signals: Signals
) -> protocol.Ended:
    """Do the keeper's work: end what is left of the attempt, and copy its output.

    Args:
        life: the attempt's life; its keeper has died and been reaped.
        standby: the dead keeper.
        observer: names our children that are not part of the attempt.
        signals: signals that ask us to end; they limit the wait for a slow reader.

    Returns:
        How the attempt ended. Only exit status 0 is trusted: we may have caused any other.
    """
    family = process_tree.Family(observer.spared)
    family.first = life.launcher
    killed, unkillable = family.end()
    family.living()  # takes the status of a launcher that had ended by itself
    tails = {1: b"", 2: b""}
    carrying = _Carrying(life, signals)
    for ends in standby.outputs:
        tails[ends.outer] = carrying.carry(ends)
    status = int(signal.SIGKILL)
    if 0 in (life.status, family.status):
        status, life.ended_by = 0, "job"
    return protocol.Ended(status, killed, unkillable, (tails[1], tails[2]))


class _Carrying:
    """Copy what a dead keeper has left in the job's pipes, and handle signals during that time."""

    def __init__(self, life: AttemptLife, signals: Signals) -> None:
        self._life = life
        self._signals = signals
        self._limit: float | None = None  # set once an end is requested, which may have been before
        self._limit_wait()

    def carry(self, ends: OutputPipes) -> bytes:
        """Write the remaining bytes to our output; return the end of them."""
        tail = Tail(1 << 16)
        for source in (ends.stage_out, ends.ours):
            while data := _read(source):
                tail.add(memoryview(data))
                if not self._write(ends.outer, memoryview(data)):
                    self._life.exact = False
                    return tail.read()
        return tail.read()

    def _write(self, target: int, data: memoryview) -> bool:
        """Write everything; return False if nobody reads it, or not in time."""
        poller = select.poll()
        poller.register(target, select.POLLOUT)
        poller.register(self._signals.fd, select.POLLIN)
        while data:
            left_s = None if self._limit is None else self._limit - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            ready = dict(poller.poll(None if left_s is None else left_s * 1000))
            if self._signals.fd in ready:
                self._take_signals()
            if target in ready:
                try:
                    data = data[os.write(target, data[:_PIECE_BYTES]) :]
                except BlockingIOError:
                    continue
                except OSError:  # its reader is gone
                    return False
        return True

    def _take_signals(self) -> None:
        for number, sender in self._signals.read():
            self._life.take_signal(number, sender)
        self._limit_wait()

    def _limit_wait(self) -> None:
        if self._life.interrupted and self._limit is None:
            self._limit = time.monotonic() + protocol.HURRIED_DRAIN_S


def _read(fd: int) -> bytes:
    if fd < 0:
        return b""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # end of a terminal, or held by a process that cannot be killed
        return b""
