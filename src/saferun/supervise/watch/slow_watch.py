"""Watch for a rank that the others wait for: it is reported once, and nothing is done to it.

At intervals a signal asks the ranks for the times of their last collectives
(inject/collective_times.py), which diagnosis/slow_rank.py compares. A rank is reported when two
successive answers show it. NCCL's calls alone prove nothing: if they, or the clocks of a GPU, give
a suspicion, NCCL measures its collectives from then on, and the next answer decides. A healthy job
only spends some 40 ms in each rank on writing the times, first after three minutes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from saferun.base import files
from saferun.diagnosis import slow_rank
from saferun.diagnosis.slow_rank import Slow, Times
from saferun.gpu import nvml
from saferun.inject import contract
from saferun.keeper import process_tree
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.beside import NEVER_S, Beside
from saferun.supervise.watch import rank_facts
from saferun.supervise.watch.hang_watch import HangWatch
from saferun.supervise.watch.rank_facts import CpuState
from saferun.supervise.watch.running_job import RunningJob
from saferun.system.command import Child

FIRST_S = 180.0  # until then the job starts and compiles
EVERY_S = 600.0
SELDOM_S = 1800.0  # interval after some answers that showed nothing
CONFIRM_S = 60.0  # until the second, confirming answer
_SOME = 6
_ANSWER_S = 20.0  # a rank may be in a step that takes this long
_AGAIN_S = 0.5
_SILENT_S = 5.0  # between looks for the end of a silence
_MOST_BYTES = 16 << 20


class TimesAsked:
    """The ranks that were asked, and when."""

    def __init__(
        self, ranks: Mapping[int, int], files: Mapping[int, str], cards: Child | None
    ) -> None:
        self.ranks, self.files, self.cards = ranks, files, cards
        self.until_s = time.monotonic() + _ANSWER_S

    def is_ready(self) -> bool:
        """Return whether all have answered, or had the time for it."""
        if time.monotonic() >= self.until_s:
            return True
        answered = self.cards is None or self.cards.has_ended()
        return answered and all(map(os.path.exists, self.files.values()))


class SlowWatch(Beside):
    """Watch one attempt for a slow rank.

    Args:
        job: the attempt.
        hangs: tells whether the job is silent; an answer would count as a sign of work.
    """

    def __init__(self, job: RunningJob, hangs: HangWatch) -> None:
        self._job, self._hangs = job, hangs
        self._uuids = [gpu.uuid for gpu in job.plan.gpus.gpus]
        self._has_begun = False
        self._asked: TimesAsked | None = None
        self._is_timed = False  # NCCL was told to measure its collectives
        self._suspect: int | None = None
        self._answers = 0  # number of answers that showed nothing
        self._states: dict[int, CpuState] = {}  # at the previous answer
        self._stolen = (0, 0)

    def ended(self, ended: AttemptEnd) -> None:
        """Stop waiting for the GPUs' data: the attempt has ended."""
        if self._asked and self._asked.cards:
            self._asked.cards.take()

    def look(self) -> float:
        """Look at the job; return the seconds until the next look."""
        if self._job.receipts is None or self._job.plan.launcher != "torchrun":
            return NEVER_S
        if not self._has_begun:
            self._has_begun = True
            return FIRST_S
        if self._asked is None:
            if self._hangs.is_silent:
                return _SILENT_S
            self._asked = self._ask(self._job.receipts)
            return _AGAIN_S if self._asked else self._next_s()
        if not self._asked.is_ready():
            return _AGAIN_S
        asked, self._asked = self._asked, None
        return self._judge(asked, _take(asked))

    def _ask(self, receipts: str) -> TimesAsked | None:
        """Ask the ranks for their times; None if they cannot answer."""
        ranks = self._job.ranks()
        able = all(process_tree.catches(pid, contract.TIMES_SIGNAL) for pid in ranks.values())
        names = os.listdir(receipts)
        files = {
            rank: os.path.join(receipts, name.removesuffix(".jsonl") + contract.TIMES)
            for rank, pid in ranks.items()
            for name in names
            if name.endswith(f"-pid{pid}.jsonl")
        }
        if len(ranks) < 2 or not able or files.keys() != ranks.keys():
            return None
        for rank, pid in ranks.items():
            _remove(files[rank])
            _signal(pid, contract.TIMES_SIGNAL)
        cards = rank_facts.ask_cards(self._job.environ) if self._uuids else None
        return TimesAsked(ranks, files, cards)

    def _next_s(self) -> float:
        self._suspect = None
        self._answers += 1
        return EVERY_S if self._answers < _SOME else SELDOM_S

    def _judge(self, asked: TimesAsked, times: Mapping[int, Times]) -> float:
        told = rank_facts.answer_of(asked.cards) if asked.cards else nvml.NvmlReport()
        cards = rank_facts.of_ranks(told, asked.ranks, self._uuids)
        now_s, pids = time.monotonic(), set(asked.ranks.values())
        states = {rank: rank_facts.cpu_state(pid, now_s) for rank, pid in asked.ranks.items()}
        before, self._states = self._states, states
        stolen_before, self._stolen = self._stolen, rank_facts.stolen()
        slow = slow_rank.judge(times) if times.keys() == asked.ranks.keys() else None
        odd = [rank for rank in cards if rank_facts.of_gpu(cards, rank, pids)]
        if slow_rank.wants_durations(times) and not self._is_timed and (slow or odd):
            self._is_timed = True
            for pid in asked.ranks.values():  # earlier times were not measured, and are not read
                if process_tree.catches(pid, contract.TIMING_SIGNAL):
                    _signal(pid, contract.TIMING_SIGNAL)
            return CONFIRM_S
        if slow is None or not slow.is_proven:
            return self._next_s()
        if self._suspect != slow.rank:
            self._suspect = slow.rank
            return CONFIRM_S
        card = cards.get(slow.rank)
        self._report(
            slow,
            [
                *rank_facts.of_gpu(cards, slow.rank, pids),
                *rank_facts.of_cpu(before, states, slow.rank, card.bus if card else ""),
                *rank_facts.of_machine(stolen_before, self._stolen),
            ],
        )
        return NEVER_S

    def _report(self, slow: Slow, facts: list[str]) -> None:
        line = slow_rank.sentence(slow, facts)
        self._job.record.slow(slow, line, facts)
        self._job.say(line)


def _take(asked: TimesAsked) -> dict[int, Times]:
    """Return the times of the ranks that have answered, and remove their files."""
    found = {}
    for rank, path in asked.files.items():
        times = slow_rank.read(files.read_private(path, _MOST_BYTES) or b"")
        _remove(path)
        if times is not None:
            found[rank] = times
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and gives no answer
        os.kill(pid, number)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
