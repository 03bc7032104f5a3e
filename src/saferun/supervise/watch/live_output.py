"""Read a running job's output: the keeper's memory files, and the files that it writes to."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from saferun.base import files, proc
from saferun.keeper import output_tail
from saferun.supervise import rank_processes

_BYTES = 64 * 1024  # bytes read of one end of a file

FileId = tuple[int, int]  # st_dev, st_ino


def ends(
    keeper: int, launcher: int, since: Mapping[FileId, int] = MappingProxyType({})
) -> Iterator[tuple[bytes, float]]:
    """Yield the end of each output of a job, and how many seconds ago it grew.

    The files that ranks write to are included.

    Args:
        keeper: the pid of the job's keeper.
        launcher: the pid of the command that it started.
        since: the result of `sizes`; only later output is wanted.
    """
    for _, data, at_s in _memories(keeper):
        yield data[-_BYTES:], max(0.0, time.monotonic() - at_s)
    pids = (launcher, *rank_processes.ranks(launcher).values())
    found = {_id(status): (path, status) for pid in pids for path, status in _files(pid)}
    for file, (path, status) in found.items():
        data = _part(path, max(since.get(file, 0), status.st_size - _BYTES))
        yield data, max(0.0, time.time() - status.st_mtime)


def beginnings(keeper: int, launcher: int, since: Mapping[FileId, int]) -> list[bytes]:
    """Return the whole lines at the beginning of each output of a job's command.

    An output whose beginning is gone is left out.

    Args:
        keeper: the pid of the job's keeper.
        launcher: the pid of the command that it started.
        since: the result of `sizes`; earlier content is left out.
    """
    found = [data if moves == 0 else b"" for moves, data, _ in _memories(keeper)]
    found += [_part(path, since.get(_id(status), 0)) for path, status in _files(launcher)]
    return [_whole(data) for data in found]


def sizes(launcher: int) -> dict[FileId, int]:
    """Return the sizes in bytes of the files that a command writes to."""
    return {_id(status): status.st_size for _, status in _files(launcher)}


def of_ranks(launcher: int) -> dict[int, list[bytes]]:
    """Return the beginnings of the ranks' own output files."""
    shared, found = sizes(launcher).keys(), {}
    for rank, pid in rank_processes.ranks(launcher).items():
        own = [_whole(_part(path, 0)) for path, status in _files(pid) if _id(status) not in shared]
        found[rank] = own
    return {rank: own for rank, own in found.items() if any(own)}


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
