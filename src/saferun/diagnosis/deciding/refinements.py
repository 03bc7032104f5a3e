"""Pure: refine a match's kind by other knowledge: numbers, progress, ranks, the machine.

Several failures print the same message. They are told apart by the numbers in the message, the
job's progress, the number of ranks that report it, and measurements on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.reading import oom_message, progress
from saferun.diagnosis.reading.crash_stack import crash_stack
from saferun.diagnosis.reading.log_lines import Line

# A host that is a number is an address in 0.0.0.0/8, where nobody listens: 05 is 0.0.0.5.
_NO_HOST = re.compile(
    r"network address of \(\d{1,10}, |to host \d{1,10}:\d{1,5}(?: |$)"
    r"|connect to \[?(?:::ffff:)?0\.\d{1,3}\.\d{1,3}\.[1-9]"
)
_BARRIER = re.compile(
    r"(?:on rank: (?P<rank>\d{1,6}), .{0,80})?"
    r"world_size=(?P<size>\d{1,6}), (?:worker_count|num_workers_joined)=(?P<joined>\d{1,6})"
)
_CRASHES = (  # kinds that are known only from the signal of a crash
    *("abort-unknown", "dataloader-shm-full", "illegal-instruction"),
    *("segfault", "segfault-environment"),
)
# kind -> its kind in the first steps, and after long progress. A fault of code or build shows at
# once; a job that ran well for long may run well again.
_BY_PROGRESS = {
    "cuda-illegal-access": ("cuda-illegal-access", "cuda-illegal-access-sporadic"),
    "cuda-launch-failure": ("cuda-illegal-access", "cuda-launch-failure"),
    "cuda-launch-timeout": ("cuda-launch-timeout", "cuda-launch-failure"),
    "cublas-cudnn-failed": ("cublas-cudnn-failed", "cuda-launch-failure"),
    "dataloader-worker-died": ("dataloader-worker-died", "ended-by-signal"),
    "cuda-init-unknown-error": ("cuda-init-unknown-error", "cuda-launch-failure"),
}
_WORKER_CRASHED = re.compile(
    r"unexpected (?:segmentation fault|floating-point exception) encountered in worker"
    r"|killed by signal: Segmentation fault",
    re.I,
)
# The DataLoader itself meets the end of its worker while that hands over a batch.
_HANDS_OVER = re.compile(r"in _try_get_data\b.{1,2000}in rebuild_storage_fd\b", re.S)
_LOADS = re.compile(r"<frozen importlib\._bootstrap_external>.{1,20} in (?:create|exec)_module$")
# A source file of a kernel that is not torch's; the checks of its calls print it beside the
# message.
_KERNEL_FILE = re.compile(r"(?<!\S)(?!\S{0,300}(?:aten|c10|torch|THC)/)\S{1,200}\.cuh?\b", re.I)
# Only with these statuses of cuBLAS and cuDNN did a call fail that had been possible.
_CALL_FAILED = re.compile(r"STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)")
# The first collective of a group is a barrier in most programs: ranks wait in it while another one
# still prepares data. PG 0 is the default group.
_TIMED_OUT = re.compile(
    r"(?:\[(?:PG (?:ID )?(?P<group>\d{1,4})[^\]]{0,80} )?Rank (?P<rank>\d{1,5})\].{0,200}?)?"
    r"WorkNCCL\(SeqNum=(?P<seq>\d{1,9}), OpType=\w{1,40}"
    r"(?:, NumelIn=(?P<numel>\d{1,12})"
    r"|, TensorShape=\[(?P<shape>[\d, ]{0,60})\])?"  # up to torch 2.0
)
# The limit, or the time that the operation ran: the watchdog checks only periodically.
_TIMEOUT_MS = re.compile(r"(?:Timeout\(ms\)=| ran for )(\d{1,10})")
_FIRST_SEQUENCE = 3  # sequence numbers up to this one are the first collectives
_COMMUNICATOR = re.compile(
    r"^(?P<host>[\w.-]{1,64}):\d{1,9}:\d{1,9} \[\d{1,3}\] NCCL INFO .{0,200}?"
    r"\brank (?P<rank>\d{1,6}) nranks \d{1,6} .{0,80}?busId (?P<bus>\w{1,12})"
    r" commId (?P<id>\w{1,20})"
)
# A line of nccl-tests: size, count, type, operation, root, then twice time, two bandwidths, wrong
# values.
_TESTED = re.compile(
    r"^\s{1,20}\d{1,16}\s{1,20}\d{1,16}\s{1,10}\w{1,12}\s{1,10}\w{1,12}\s{1,10}-?\d{1,6}"
    r"(?:\s{1,12}[\d.]{1,12}){3}\s{1,12}(\d{1,16}|N/A)(?:\s{1,12}[\d.]{1,12}){3}"
    r"\s{1,12}(\d{1,16}|N/A)$"
)
_TF_LIMIT = re.compile(r"^\s{0,4}Limit:\s{1,40}(\d{1,14})$")
_TF_LIMIT_LINES = 400  # lines above the failure: TensorFlow lists every chunk of memory
_TF_LITTLE = 1 << 30  # bytes: TensorFlow normally takes nearly all free memory at its start
_OTHERS = re.compile(r"Process (\d{1,9}) has")
_OWN = re.compile(r"\(pid: (\d{1,9})\)|Sending process (\d{1,9}) closing|\bpid=(\d{1,9})\b")


class KindRefinement:
    """The knowledge beside the matches of one log; each part is determined once, when needed."""

    def __init__(
        self, matches: Sequence[Candidate], evidence: Evidence, lines: Sequence[Line]
    ) -> None:
        self._matches = matches
        self._evidence = evidence
        self._lines = lines  # the log's lines
        self._decide: dict[str, Callable[[Candidate], str]] = {
            "cuda-oom": self._of_memory,
            "disk-full": self._of_full_disk,
            "tf-oom": self._of_tensorflow_memory,
            "rendezvous-connect-failed": self._of_store_barrier,
            "cuda-devices-busy": self._of_busy_device,
            "nccl-timeout": lambda match: self._timeout or self._of_nccl(match),
            "nccl-invalid-usage": self._of_nccl,
            "nccl-internal-error": self._of_nccl,
            "nccl-system-error": self._of_nccl,
            "nccl-unhandled-cuda-error": self._of_nccl,
        }

    def kind_of(self, match: Candidate) -> str:
        """Return the kind of a match, decided by the circumstances if several look alike."""
        if _WORKER_CRASHED.search(match.text):  # the worker crashed, but not from lack of memory
            return self._by_progress("segfault", match)
        # A DataLoader worker failed: torch knows only the signal's number and guesses the reason.
        killed = "killed by signal" in match.text or "bus error encountered in worker" in match.text
        kind = by_machine(match.kind, self._evidence) if killed else match.kind
        kills = self._evidence.oom_kills if kind == "dataloader-worker-died" else None
        if kills == 0 and (killed or (match.raised and _HANDS_OVER.search(match.raised.frames))):
            return "ended-by-signal"  # memory was not short, so it may not happen again
        if killed or kills:
            return kind if killed else "host-oom-killed"
        decide = self._decide.get(match.kind)
        return decide(match) if decide is not None else self._by_progress(match.kind, match)

    def of_signal(self, ended: Candidate) -> str:
        """Return a signal's kind, refined by the machine and by the job's progress."""
        return self._by_progress(by_machine(ended.kind, self._evidence), ended)

    def has_begun(self, one: Candidate) -> bool:
        """Return whether the job had made its first steps before a failure."""
        steps = progress.steps(self._lines, 0, one.at if one.in_log else len(self._lines))
        ranks = {step.rank for step in steps}
        return bool(self._evidence.step) or any(progress.went_on(steps, 0, r, 2) for r in ranks)

    def wrong_values(self) -> int | None:
        """Return the line in which nccl-tests count wrong values; None if there is none."""
        header = False
        for at, line in enumerate(self._lines):
            header = header or "#wrong" in line.text
            found = _TESTED.match(line.text) if header else None
            if found and any(count not in ("0", "N/A") for count in found.groups()):
                return at
        return None

    def _by_progress(self, kind: str, crash: Candidate) -> str:
        """Return a crash's kind, refined by the job's progress.

        Args:
            kind: the crash's usual kind.
            crash: the crash's message or signal.
        """
        if kind == "segfault" and self._was_loading:
            return "segfault-environment"
        if kind not in _BY_PROGRESS:
            return kind
        early, long = _BY_PROGRESS[kind]
        if kind == "cublas-cudnn-failed" and not _CALL_FAILED.search(crash.text):
            return kind
        if kind == "cuda-illegal-access":
            beside = crash.source.lines[max(0, crash.at - 3) : crash.at + 2]
            if any(_KERNEL_FILE.search(line.text) for line in beside):
                return kind  # a bug in that kernel
        # A bar may stand before a message on its line. Evidence outside the log belongs to its end.
        end = crash.at + (crash.raised is None) if crash.in_log else len(self._lines)
        before = self._lines[:end]
        if self._ran_long(before, self._lines[end:]):
            return long
        return early if progress.is_early(before) else kind

    def _ran_long(self, before: Sequence[Line], behind: Sequence[Line]) -> bool:
        """Return whether the job made long, healthy progress."""
        if progress.diverged(before):
            return False
        age_s, step = self._evidence.age_s or 0.0, self._evidence.step or 0
        if age_s >= progress.LONG_S or step >= progress.LONG_STEPS:
            return True
        return progress.is_long(before, behind)

    @cached_property
    def _was_loading(self) -> bool:
        """Return whether the first crash came while Python loaded a compiled module."""
        innermost = crash_stack(self._lines, None)[:2]
        return any(_LOADS.search(frame) for frame in innermost)

    def _of_memory(self, match: Candidate) -> str:
        """Return the out-of-memory kind by the numbers; this job's ranks are no other process."""
        kind = oom_message.kind(oom_message.read(match.text))
        if kind == "cuda-oom-other-process" and self._pids & set(_OTHERS.findall(match.text)):
            return "cuda-oom"
        return kind

    @cached_property
    def _pids(self) -> set[str]:
        """Return the processes of this job that its launcher names."""
        lines = (line.text for line in self._lines if "pid" in line.text or "Sending" in line.text)
        return {found[found.lastindex or 0] for text in lines for found in _OWN.finditer(text)}

    def _of_full_disk(self, match: Candidate) -> str:
        """Return why a file could not be opened: if the disk has room, the path is wrong."""
        refused = "cannot be opened" in match.text and self._evidence.disk_ample
        return "permission-denied" if refused else match.kind

    def _of_tensorflow_memory(self, match: Candidate) -> str:
        """Return who used up the memory: TensorFlow got little of the card if others hold it."""
        at = match.at if match.in_log else len(self._lines)
        near = self._lines[max(0, at - _TF_LIMIT_LINES) : at + _TF_LIMIT_LINES]
        limits = (_TF_LIMIT.match(line.text) for line in near)
        limit = next((int(found[1]) for found in limits if found), _TF_LITTLE)
        return "cuda-oom-other-process" if limit < _TF_LITTLE else match.kind

    def _of_store_barrier(self, match: Candidate) -> str:
        if _NO_HOST.search(match.text):
            return "torchrun-misuse"
        counts = _BARRIER.search(match.text)
        if counts is None:
            return match.kind
        if int(counts["rank"] or 0) >= int(counts["size"]):  # the world has no such rank
            return "distributed-environment"
        more = int(counts["joined"]) > int(counts["size"])
        return "stale-rendezvous-store" if more else match.kind

    def _of_busy_device(self, match: Candidate) -> str:
        """Return whether other jobs or several ranks of this job hold the device."""
        ranks = {m.rank for m in self._matches if m.kind == match.kind and m.rank is not None}
        return "cuda-exclusive-mode-conflict" if len(ranks) > 1 else match.kind

    @cached_property
    def _timeout(self) -> str:
        """Return why collectives timed out, if numbers or a progress bar tell; else ""."""
        timeouts = [m for m in self._matches if m.kind == "nccl-timeout"]
        found = [hit for m in timeouts for hit in _TIMED_OUT.finditer(m.text)]
        begun = min((m.at for m in timeouts if m.in_log), default=len(self._lines))
        before = self._lines[:begun]
        if progress.is_over(before):  # the ranks waited for each other at their end
            return "crash-after-the-end"
        if any(map(_is_first_barrier, found)) and not progress.steps(before, 0, len(before)):
            ranks = {int(hit["rank"]) for hit in found if hit["rank"]}
            # Every rank waits and none is missing, so the connection between them is broken.
            complete = len(ranks) > 1 and ranks == set(range(len(ranks)))
            return "nccl-p2p-hang" if complete else "nccl-timeout-slow-rank"
        limits = {int(limit) / 1000 for m in timeouts for limit in _TIMEOUT_MS.findall(m.text)}
        slow = any(progress.bar_of_age(before, limit) for limit in limits)
        return "nccl-timeout-slow-rank" if slow else ""

    def _of_nccl(self, match: Candidate) -> str:
        return "nccl-duplicate-gpu" if self._shared_gpu else match.kind

    @cached_property
    def _shared_gpu(self) -> bool:
        """Return whether two ranks of one host reported the same GPU to NCCL."""
        ranks: dict[tuple[str, str, str], str] = {}
        for line in self._lines:
            if "busId" in line.text and (found := _COMMUNICATOR.match(line.text)):
                key = (found["host"], found["id"], found["bus"])
                if ranks.setdefault(key, found["rank"]) != found["rank"]:
                    return True
        return False


def by_machine(kind: str, evidence: Evidence) -> str:
    """Return a signal's kind, refined by the measurements on the machine."""
    if evidence.finished and kind in _CRASHES:
        return "crash-after-the-end"
    if kind == "host-oom-killed" and evidence.oom_kills == 0:
        return "killed-from-outside"
    if kind == "dataloader-shm-full" and evidence.shm_ample:
        return "bus-error"
    return kind


def _is_first_barrier(found: re.Match[str]) -> bool:
    default_group = found["group"] in (None, "0")
    single = found["numel"] == "1" or found["shape"] in ("", "1")
    return default_group and single and int(found["seq"]) <= _FIRST_SEQUENCE
