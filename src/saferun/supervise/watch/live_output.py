"""The output of a job that runs: the keeper's memory files, and the files that it writes to."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping

from saferun.keeper import output_tail
from saferun.supervise import rank_processes
from saferun.system import procfs

_BYTES = 64 * 1024  # read of one end of a file

FileId = tuple[int, int]  # st_dev, st_ino


def outputs(
    keeper: int, launcher: int, since: Mapping[FileId, int] | None = None
) -> Iterator[tuple[bytes, float]]:
    """Yield the end of each output of a job, and how many seconds ago it grew.

    Args:
        keeper: the pid of the job's keeper.
        launcher: the pid of the command that it started.
        since: the result of `sizes`: the beginning of what was written since is wanted, in whole
            lines, and nothing of an output whose beginning is gone.
    """
    for moves, data, at_s in _memories(keeper):
        part = data[-_BYTES:] if since is None else _whole(data if moves == 0 else b"")
        yield part, max(0.0, time.monotonic() - at_s)
    for path, status in _files(launcher):
        if since is None:
            data = _part(path, max(0, status.st_size - _BYTES))
        else:
            data = _whole(_part(path, since.get((status.st_dev, status.st_ino), 0)))
        yield data, max(0.0, time.time() - status.st_mtime)


def ends(keeper: int, launcher: int, since: Mapping[FileId, int], within_s: float) -> list[bytes]:
    """Return the ends of what was written to each output since, the ranks' own files among them.

    Args:
        keeper: the pid of the job's keeper.
        launcher: the pid of the command that it started.
        since: the result of `sizes`.
        within_s: seconds; an output that did not grow within them is left out.
    """
    now_s = time.monotonic()
    found = [data[-_BYTES:] for _, data, at_s in _memories(keeper) if now_s - at_s <= within_s]
    files = {
        (status.st_dev, status.st_ino): (path, status)
        for pid in (launcher, *rank_processes.ranks(launcher).values())
        for path, status in _files(pid)
    }
    for file, (path, status) in files.items():
        if time.time() - status.st_mtime <= within_s:
            start = since.get(file, 0)
            found.append(_part(path, max(start, status.st_size - _BYTES)))
    return found


def sizes(launcher: int) -> dict[FileId, int]:
    """Return how many bytes the files have that a command writes to."""
    return {(status.st_dev, status.st_ino): status.st_size for _, status in _files(launcher)}


def of_ranks(launcher: int) -> dict[int, list[bytes]]:
    """Return the beginnings of the files that ranks write to, of those that write to their own."""
    shared, found = sizes(launcher).keys(), {}
    for rank, pid in rank_processes.ranks(launcher).items():
        own = [
            _whole(_part(path, 0))
            for path, status in _files(pid)
            if (status.st_dev, status.st_ino) not in shared
        ]
        found[rank] = own
    return {rank: own for rank, own in found.items() if any(own)}


def _files(pid: int) -> list[tuple[str, os.stat_result]]:
    """Return the regular files that a process has as its stdout and stderr."""
    found: dict[FileId, tuple[str, os.stat_result]] = {}
    for path in (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.setdefault((status.st_dev, status.st_ino), (path, status))
    return list(found.values())


def _part(path: str, start: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(_BYTES)
    except OSError:
        return b""


def _whole(data: bytes) -> bytes:
    """Return the lines that have an end."""
    return data[: data.rfind(b"\n") + 1]


def _memories(keeper: int) -> Iterator[tuple[int, bytes, float]]:
    """Yield what output_tail.shown finds in each memory file of a keeper."""
    for name in procfs.names(f"/proc/{keeper}/fd"):
        path = f"/proc/{keeper}/fd/{name}"
        if target(path).startswith(f"/memfd:{output_tail.MEMORY}") and (found := _memory(path)):
            yield found


def _memory(path: str) -> tuple[int, bytes, float] | None:
    """Return what output_tail.shown finds in a memory file; None while it cannot be read."""
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


def target(path: str) -> str:
    """Return what a link leads to; "" where it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
