"""Gather the evidence about an attempt: the end of its output, error files, the machine.

diagnosis/deciding/classify.py draws the conclusions. Missing sources raise nothing.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterable, Iterator

from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.reading.log_lines import Log
from saferun.journal import rank_files
from saferun.journal import receipts as journal_receipts
from saferun.supervise.attempt_end import AttemptEnd
from saferun.system import cgroup

_MACHINE = "/proc/vmstat"  # counts the kills of the whole machine
_NOT_OPENED = re.compile(r"File (\S{1,4000}) cannot be opened")  # torch.save
_DISK_BYTES = 1 << 30  # free bytes on a disk on which a checkpoint's file can be opened
_SHM_BYTES = 1 << 30  # sixteen times a container's default


def evidence(
    ended: AttemptEnd, receipts: str | None, attempt: int, oom_kills: int | None = None
) -> Evidence:
    """Return what is known about an ended attempt.

    Args:
        ended: how it ended, with the last bytes of its stdout and stderr.
        receipts: the directory of its ranks' receipts and error files; None if there is none.
        attempt: the attempt's number.
        oom_kills: number of processes that the kernel killed during it (`OutOfMemoryKills`); None
            if unknown.
    """
    from saferun.diagnosis.reading import log_reader  # only an attempt's end needs it

    out, err = ended.report.tails
    log = log_reader.read((out, b"\n", err))
    return Evidence(
        log=log,
        stderr_from=out.count(b"\n") + 2 if err else None,  # a terminal has both in one
        exit_code=ended.exit_code,
        failures=rank_files.failures(receipts, attempt),
        age_s=ended.lived_s,
        step=_last_step(ended),
        oom_kills=oom_kills,
        reader_gone=_reader_is_gone(),
        unkillable=len(ended.report.unkillable),
        shm_ample=_shm_is_ample(),
        disk_ample=_disk_is_ample(log),
        keeper=ended.keeper,
        finished=journal_receipts.finished(journal_receipts.read(receipts, attempt)),
    )


def _last_step(ended: AttemptEnd) -> int | None:
    from saferun.diagnosis.reading import progress  # only an attempt's end needs it

    steps = map(progress.last_step, ended.report.tails)
    return max((step for step in steps if step is not None), default=None)


def _reader_is_gone() -> bool:
    """Return whether the reader of our (and the job's) stdout or stderr has gone (`| head`)."""
    poller = select.poll()
    for fd in (1, 2):
        poller.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))


def _shm_is_ample() -> bool | None:
    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108 - looked at, not written to
    except OSError:
        return None
    return shm.f_blocks * shm.f_frsize >= _SHM_BYTES and shm.f_bfree * 2 >= shm.f_blocks


def _disk_is_ample(log: Log) -> bool | None:
    """Return whether a disk has room on which no file could be opened; None if no file failed."""
    found = (_NOT_OPENED.search(line.text) for line in log.lines if "cannot be" in line.text)
    path = next((hit[1] for hit in found if hit), None)
    if path is None:
        return None
    try:
        disk = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize >= _DISK_BYTES and (disk.f_favail > 0 or not disk.f_files)


class OutOfMemoryKills:
    """Count the processes that the kernel has killed for lack of memory since this was made.

    The kernel or a user killed a rank that died of SIGKILL. Only the kernel's counters tell which.
    Each control group has one, and a rank may run in another group than this process.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # path -> count, for each readable counter
        self._groups: set[tuple[str, ...]] = set()
        self._saw_ranks = False
        self._note((_MACHINE,))
        self._groups.add(self._note(cgroup.oom_kill_files()))

    def see(self, pids: Iterable[int]) -> None:
        """Note the control groups of living ranks."""
        for pid in pids:
            files = cgroup.oom_kill_files(pid)
            self._saw_ranks = self._saw_ranks or bool(files)
            if files and files not in self._groups:
                self._groups.add(self._note(files))

    def since(self) -> int | None:
        """Return the number of kills; None if the readable counters do not tell."""
        machine = self._growth(_MACHINE)
        if machine == 0:
            return 0
        counters = {next(filter(self._is_known, files), "") for files in self._groups}
        folders = {os.path.dirname(path) for path in counters if path}
        apart = [path for path in counters - {""} if not folders & set(_above(path))]
        if not apart:
            return machine
        found = sum(self._growth(path) or 0 for path in apart)
        return found if found or (self._saw_ranks and "" not in counters) else None

    def _note(self, files: tuple[str, ...]) -> tuple[str, ...]:
        for path in files:
            count = cgroup.oom_kills(path)
            if count is not None:
                self._before.setdefault(path, count)
        return files

    def _is_known(self, path: str) -> bool:
        return self._growth(path) is not None

    def _growth(self, path: str) -> int | None:
        now, before = cgroup.oom_kills(path), self._before.get(path)
        return None if now is None or before is None else max(0, now - before)


def _above(path: str) -> Iterator[str]:
    """Yield the parent folders of a counter whose own counters include it."""
    folder = os.path.dirname(path)
    if not path.endswith(cgroup.COUNTS_BELOW):
        return
    while (parent := os.path.dirname(folder)) != folder:
        yield (folder := parent)
