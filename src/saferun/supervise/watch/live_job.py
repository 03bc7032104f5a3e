"""One look at a running job, which it does not notice: its output, its ranks, its signs of work.

Its output is in the keeper's memory files and in the files that the job and its ranks write to;
the rest is in /proc.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from saferun.base import files, proc
from saferun.diagnosis.reading import progress
from saferun.diagnosis.silence import Look
from saferun.keeper import output_tail
from saferun.supervise import rank_processes
from saferun.supervise.watch import work_signs
from saferun.supervise.watch.work_signs import Tree

_BYTES = 64 * 1024  # bytes read of one end of a file

FileId = tuple[int, int]  # st_dev, st_ino


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A running job, seen from outside: by the run that has started it, or by `runs watch`."""

    keeper: int  # pid
    launcher: int  # pid of the command that the keeper has started

    def ends(
        self, since: Mapping[FileId, int] = MappingProxyType({})
    ) -> Iterator[tuple[bytes, float]]:
        """Yield the end of each output of the job, and how many seconds ago it grew.

        The files that ranks write to are included.

        Args:
            since: the result of `sizes`; only later output is wanted.
        """
        for _, data, at_s in _memories(self.keeper):
            yield data[-_BYTES:], max(0.0, time.monotonic() - at_s)
        pids = (self.launcher, *self.ranks().values())
        found = {_id(status): (path, status) for pid in pids for path, status in _files(pid)}
        for file, (path, status) in found.items():
            data = _part(path, max(since.get(file, 0), status.st_size - _BYTES))
            yield data, max(0.0, time.time() - status.st_mtime)

    def beginnings(self, since: Mapping[FileId, int]) -> list[bytes]:
        """Return the whole lines at the beginning of each output of the job's command.

        An output whose beginning is gone is left out.

        Args:
            since: the result of `sizes`; earlier content is left out.
        """
        found = [data if moves == 0 else b"" for moves, data, _ in _memories(self.keeper)]
        found += [_part(path, since.get(_id(status), 0)) for path, status in _files(self.launcher)]
        return [_whole(data) for data in found]

    def beginnings_of_ranks(self) -> dict[int, list[bytes]]:
        """Return the beginnings of the ranks' own output files."""
        shared, found = self.sizes().keys(), {}
        for rank, pid in self.ranks().items():
            files = [(path, status) for path, status in _files(pid) if _id(status) not in shared]
            found[rank] = [_whole(_part(path, 0)) for path, _ in files]
        return {rank: own for rank, own in found.items() if any(own)}

    def sizes(self) -> dict[FileId, int]:
        """Return the sizes in bytes of the files that the job's command writes to."""
        return {_id(status): status.st_size for _, status in _files(self.launcher)}

    def ranks(self) -> dict[int, int]:
        """Return the pids of the ranks, by rank."""
        return rank_processes.ranks(self.launcher)

    def look(self, at_s: float, tree: Tree) -> Look | None:
        """Return the signs of work of the job's processes; None if no rank is visible.

        Args:
            at_s: the current time, for the result.
            tree: the children of each process.
        """
        return work_signs.observe_job(self.launcher, at_s, tree)


def newest_step(ends: Iterable[tuple[bytes, float]]) -> tuple[int, str, float] | None:
    """Return the last step that a job's output reports, its loss, and how old it is in seconds.

    Args:
        ends: the ends of the job's outputs.
    """
    found = [(*last, age_s) for data, age_s in ends for last in progress.reports(data)[-1:]]
    return max(found, key=lambda one: one[0], default=None)


def _files(pid: int) -> list[tuple[str, os.stat_result]]:
    """Return the regular files that are a process's stdout and stderr."""
    found: dict[FileId, tuple[str, os.stat_result]] = {}
    for path in (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.setdefault(_id(status), (path, status))
    return list(found.values())


def _id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _part(path: str, start: int) -> bytes:
    return files.read(path, _BYTES, start, follow=True)


def _whole(data: bytes) -> bytes:
    """Return the complete lines."""
    return data[: data.rfind(b"\n") + 1]


def _memories(keeper: int) -> Iterator[tuple[int, bytes, float]]:
    """Yield the result of output_tail.shown for each memory file of a keeper."""
    for number, target in proc.descriptors(keeper).items():
        is_memory = target.startswith(f"/memfd:{output_tail.MEMORY}")
        if is_memory and (found := _memory(f"/proc/{keeper}/fd/{number}")):
            yield found


def _memory(path: str) -> tuple[int, bytes, float] | None:
    """Return the result of output_tail.shown for a memory file; None while it cannot be read."""
    try:
        with open(path, "rb") as file:
            for _ in range(3):
                file.seek(0)
                found = output_tail.shown(file.read())
                file.seek(0)
                if found and int.from_bytes(file.read(8), "little") == found[0]:
                    return found
    except OSError:
        return None
    return None
