"""Ask the ranks for the dumps of torch's flight recorder, and read them.

The thread of torch that watches NCCL reads a named pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE) once a
second, and writes a dump for each byte (ProcessGroupNCCL.cpp, `DumpPipe`; torch 2.4 on). If the
watch is on, the plan names the pipe and the dump; names that the user gives are used instead. Gloo
has no such thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from saferun.base import files, proc
from saferun.diagnosis import flight_record
from saferun.diagnosis.flight_record import Dump
from saferun.diagnosis.silence import RankSign
from saferun.planning.own_variables import DUMPS, PIPE

# The time for all dumps: torch looks once a second and needs the GIL for the lines of the script. A
# first dump took more than 5 s if its files were not yet in memory.
LIMIT_S = 10.0
_MOST_BYTES = 64 << 20  # read of a dump; torch's default of 2000 entries takes some 2 MiB


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A dump that was asked for."""

    path: str
    before: tuple[int, int] | None


class FlightDumps:
    """The dumps of some ranks, which arrive without anybody waiting for them.

    Args:
        ranks: the ranks to ask, if they can be asked.
        at_s: the current time, by any clock that does not jump.
    """

    def __init__(self, ranks: Iterable[RankSign], at_s: float) -> None:
        self._until_s = at_s + LIMIT_S
        self._asked: dict[int, DumpFile] = {}
        self._read: dict[int, Dump] = {}
        for one in ranks:
            if one.rank is not None and (path := _ask(one.pid, one.rank)):
                self._asked[one.rank] = path

    def are_ready(self, at_s: float) -> bool:
        """Return whether no more dumps will come."""
        for rank, asked in self._asked.items():
            if rank not in self._read and _stamp(asked.path) not in (None, asked.before):
                dump = flight_record.read(files.read_private(asked.path, _MOST_BYTES) or b"")
                if dump is not None:  # None while it is being written
                    self._read[rank] = dump
        return at_s >= self._until_s or self._read.keys() == self._asked.keys()

    @property
    def asked(self) -> frozenset[int]:
        """Return the ranks that were asked."""
        return frozenset(self._asked)

    def take(self) -> dict[int, Dump]:
        """Return rank -> its dump, for the dumps that have come."""
        return self._read


def _ask(pid: int, rank: int) -> DumpFile | None:
    """Ask a rank for its dump; return where it will be, or None if the rank cannot be asked."""
    environ = proc.environ(pid)
    name = next((environ[name] for name in DUMPS if environ.get(name)), None)
    if not environ.get(PIPE) or not name:
        return None
    asked = DumpFile(f"{name}{rank}", _stamp(f"{name}{rank}"))
    try:  # fails without a reader: torch has not made it, or has ended
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        pipe = os.open(f"{environ[PIPE]}{rank}.pipe", flags)
    except OSError:
        return None
    try:
        if stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.write(pipe, b"1")
            return asked
    except OSError:
        pass
    finally:
        os.close(pipe)
    return None


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        seen = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size
