"""Pure: the result of NCCL's own diagnosis of the paths between GPUs, if it was asked for.

With NCCL_RUN_DIAGNOSTICS, NCCL 2.31 and later tests the paths of each communicator, and the process
of its rank 0 prints lines with "NCCL DIAG". A failed test does not end the job:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/diagnostics.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

MARK = b"NCCL DIAG "
_LINE = re.compile(r"(?P<process>[^\s:]{0,64}:\d{1,10} )?NCCL DIAG (?P<text>.{1,1000})")
_BEGINS = "=== NCCL Diagnostics ==="
_ENDS = re.compile(r"NCCL diagnostics completed in [\d.]{1,20} ms across (\d{1,7}) ranks")
_FAILED = re.compile(
    r"\[INFO\] p2p: (?P<what>[A-Za-z/ -]{1,60}) "
    r"srcRank=(?P<src>\d{1,7}) srcCudaDev=\d{1,4} srcNvmlDev=(?P<src_gpu>\d{1,4}) "
    r"dstRank=(?P<dst>\d{1,7}) dstCudaDev=\d{1,4} dstNvmlDev=(?P<dst_gpu>\d{1,4}) "
    r"path=(?P<path>\w{1,10})"
)
_COUNT = re.compile(r"p2p: (?:only (\d{1,7})/(\d{1,7}) |verified .{1,80}\((\d{1,7}) peer accesses)")
_SLOW = re.compile(
    r"net bw: \S{1,20} rank (\d{1,7}) \((\S{1,64})\): ([\d.]{1,20}) Gbit/s, "
    r">30% off median ([\d.]{1,20}) Gbit/s"
)
_WRONG = "mismatch"  # in a test whose copy arrived with wrong data
_BY = "NCCL's own test"


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a path."""

    rank: int
    gpu: int  # NVML's number


@dataclass(frozen=True, slots=True)
class NcclTests:
    """The answer of one attempt."""

    finding: str = ""  # one clause for people; "" if nothing could be tested
    line: str = ""  # the line of a failed path between GPUs; "" if none failed
    rank: int | None = None  # the rank that all failed paths share, if known
    is_wrong: bool = False  # wrong data arrived
    completed: bool = False


class _Communicator:
    """The printed lines about one communicator."""

    def __init__(self) -> None:
        self.size = 0
        self.failed: dict[tuple[_End, _End], tuple[re.Match[str], str]] = {}  # with the line
        self.passed = self.tested = 0
        self.slow = ""

    def take(self, text: str, line: str) -> None:
        if found := _FAILED.match(text):
            ends = [_End(int(found[end]), int(found[f"{end}_gpu"])) for end in ("src", "dst")]
            self.failed[ends[0], ends[1]] = found, line
        elif found := _COUNT.search(text):
            passed, of, every = (int(number or 0) for number in found.groups())
            self.passed, self.tested = passed or every, of or every
        elif found := _SLOW.search(text):
            rank, host, rate, median = found.groups()
            self.slow = f"the network of rank {rank} ({host}) carries {rate} Gbit/s of {median}"
        elif found := _ENDS.match(text):
            self.size = int(found[1])


def read(outputs: Iterable[bytes], world_size: int) -> NcclTests | None:
    """Return NCCL's findings; None if it printed none.

    Args:
        outputs: beginnings and ends of the job's outputs; they may overlap.
        world_size: number of the job's ranks; 0 if unknown. A smaller communicator numbers its
            ranks differently, so they identify no rank of the job.
    """
    reports: list[_Communicator] = []
    latest: dict[str, _Communicator] = {}  # by the pid of the printing process
    for output in outputs:
        for raw in output.split(b"\n") if MARK in output else ():
            line = raw.decode("utf-8", "replace").strip()
            if (found := _LINE.search(line)) is None:
                continue
            process = found["process"] or ""
            if found["text"].startswith(_BEGINS) or process not in latest:
                latest[process] = _Communicator()
                reports.append(latest[process])
            latest[process].take(found["text"], found[0].strip())
    if not reports:
        return None
    largest = max(report.size for report in reports)
    told = [one for one in reports if one.size in (largest, 0)]
    worst = max(told, key=lambda one: (len(one.failed), bool(one.slow), one.tested))
    return replace(_answer(worst, knows_ranks=largest == world_size), completed=largest > 0)


def _answer(report: _Communicator, *, knows_ranks: bool) -> NcclTests:
    paths = sorted(report.failed.items(), key=lambda path: _WRONG not in path[1][0]["what"])
    if not paths and report.slow:
        return NcclTests(f"{_BY}: {report.slow}")
    if not paths:
        well = f"{_BY}: the paths between GPUs work ({report.passed} of {report.tested})"
        return NcclTests(well if report.tested and report.passed == report.tested else "")
    (ends, (first, line)), rest = paths[0], len(paths) - 1
    common = set.intersection(*(set(ends) for ends in report.failed))
    names = [_name(end, knows_ranks=knows_ranks) for end in ends]
    finding = f"{_BY}: {first['what']} from {names[0]} to {names[1]} ({first['path']})"
    if rest:
        finding += f", {rest} more failed"
    alone = common.pop() if len(common) == 1 else None
    if alone is not None and rest:
        finding += f", {_name(alone, knows_ranks=knows_ranks)} is in all of them"
    if report.tested:
        finding += f", {report.passed} of {report.tested} passed"
    rank = alone.rank if alone is not None and knows_ranks else None
    return NcclTests(finding, line, rank, _WRONG in first["what"])


def _name(end: _End, *, knows_ranks: bool) -> str:
    return f"GPU {end.gpu}" + (f" (rank {end.rank})" if knows_ranks else "")
