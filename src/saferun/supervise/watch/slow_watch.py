"""Watch for a rank that the others wait for: it is named once, and nothing is done to it.

Now and then the ranks are asked, by a signal, for the times of their last collectives
(inject/collective_times.py), which diagnosis/slow_rank.py compares. A rank is named when two
answers in a row show it. NCCL's calls alone prove nothing; where they, or the clocks of a GPU, give
reason to, NCCL's collectives are timed from then on, and the next answer decides. In a job that is
well nothing changes but that a rank writes its times for some 40 ms, first after three minutes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from saferun.diagnosis.evidence import Hang
from saferun.inject import contract
from saferun.keeper import process_tree
from saferun.model import LaunchPlan
from saferun.supervise import rank_processes
from saferun.supervise.records.record import Record
from saferun.supervise.watch.first_steps import NEVER_S
from saferun.system import paths

if TYPE_CHECKING:  # only a job that has run for minutes needs them
    from saferun.diagnosis.slow_rank import Slow, Times
    from saferun.supervise.watch.rank_facts import Cards, CpuState

FIRST_S = 180.0  # the job starts, and compiles
EVERY_S = 600.0
SELDOM_S = 1800.0  # after some answers that showed nothing
CONFIRM_S = 60.0  # until the second answer
_SOME = 6
_ANSWER_S = 20.0  # a rank may be in a step that takes as long
_AGAIN_S = 0.5
_SILENT_S = 5.0  # between looks for the end of a silence
_MOST_BYTES = 16 << 20


class _Asked:
    """Who was asked, and when."""

    def __init__(self, ranks: Mapping[int, int], files: Mapping[int, str], cards: Cards) -> None:
        self.ranks, self.files, self.cards = ranks, files, cards
        self.until_s = time.monotonic() + _ANSWER_S

    def is_ready(self) -> bool:
        if time.monotonic() >= self.until_s:
            return True
        return self.cards.are_ready() and all(map(os.path.exists, self.files.values()))


class SlowWatch:
    """Watches one attempt for a slow rank.

    Args:
        plan: the attempt's.
        receipts: the directory of the ranks' receipts; None where there is none.
        record: the run's journal.
        is_silent: tells whether the job shows no sign of work: an answer would be one.
        say: takes lines for people.
        environ: the user's.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        receipts: str | None,
        record: Record,
        is_silent: Callable[[], bool],
        say: Callable[[str], None],
        environ: Mapping[str, str],
    ) -> None:
        self._receipts, self._record, self._say, self._environ = receipts, record, say, environ
        self._is_silent = is_silent
        self._uuids = [gpu.uuid for gpu in plan.gpus.gpus]
        self._is_over = receipts is None or plan.launcher != "torchrun"
        self._launcher = 0
        self._has_begun = False
        self._asked: _Asked | None = None
        self._is_timed = False  # NCCL was told to time its collectives
        self._suspect: int | None = None
        self._answers = 0  # that showed nothing
        self._states: dict[int, CpuState] = {}  # at the answer before
        self._stolen = (0, 0)
        self.cause: Hang | None = None  # it ends nothing

    def started(self, keeper: int, launcher: int) -> None:
        """Note which command runs."""
        self._launcher = launcher

    def ended(self) -> None:
        """Wait no more for who tells of the GPUs: the attempt is over."""
        if self._asked is not None:
            self._asked.cards.take()
            self._asked = None

    def check_job(self) -> float:
        """Look at the job; return the seconds until the next look. Never raises."""
        try:
            return NEVER_S if self._is_over else self._check_job()
        except Exception as error:
            self._is_over = True
            self._record.fault(error)
            return NEVER_S

    def _check_job(self) -> float:
        if not self._has_begun:
            self._has_begun = True
            return FIRST_S
        if self._asked is None:
            if self._is_silent():
                return _SILENT_S
            self._asked = self._ask()
            return _AGAIN_S if self._asked else self._next_s()
        if not self._asked.is_ready():
            return _AGAIN_S
        asked, self._asked = self._asked, None
        return self._judge(asked, _take(asked))

    def _ask(self) -> _Asked | None:
        """Ask the ranks for their times; None where they do not answer such questions."""
        from saferun.supervise.watch.rank_facts import Cards  # see the top

        ranks = rank_processes.ranks(self._launcher)
        able = all(process_tree.catches(pid, contract.TIMES_SIGNAL) for pid in ranks.values())
        names = os.listdir(self._receipts or "")
        files = {
            rank: os.path.join(self._receipts or "", name.removesuffix(".jsonl") + contract.TIMES)
            for rank, pid in ranks.items()
            for name in names
            if name.endswith(f"-pid{pid}.jsonl")
        }
        if len(ranks) < 2 or not able or files.keys() != ranks.keys():
            return None
        for rank, pid in ranks.items():
            _remove(files[rank])
            _signal(pid, contract.TIMES_SIGNAL)
        return _Asked(ranks, files, Cards(self._environ, is_wanted=bool(self._uuids)))

    def _next_s(self) -> float:
        self._suspect = None
        self._answers += 1
        return EVERY_S if self._answers < _SOME else SELDOM_S

    def _judge(self, asked: _Asked, times: Mapping[int, Times]) -> float:
        from saferun.diagnosis import slow_rank  # see the top
        from saferun.supervise.watch import rank_facts

        cards = rank_facts.of_ranks(asked.cards.take(), asked.ranks, self._uuids)
        now_s, pids = time.monotonic(), set(asked.ranks.values())
        states = {rank: rank_facts.cpu_state(pid, now_s) for rank, pid in asked.ranks.items()}
        before, self._states = self._states, states
        stolen_before, self._stolen = self._stolen, rank_facts.stolen()
        slow = slow_rank.judge(times) if times.keys() == asked.ranks.keys() else None
        odd = [rank for rank in cards if rank_facts.of_gpu(cards, rank, pids)]
        if slow_rank.wants_durations(times) and not self._is_timed and (slow or odd):
            self._is_timed = True
            for pid in asked.ranks.values():  # what they write now is not timed, and not read
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
        from saferun.diagnosis.slow_rank import sentence  # see the top

        self._is_over = True
        line = sentence(slow, facts)
        self._record.slow(slow, line, facts)
        self._say(line)


def _take(asked: _Asked) -> dict[int, Times]:
    """Return the times of the ranks that have answered, and remove their files."""
    from saferun.diagnosis import slow_rank  # see the top of SlowWatch

    found = {}
    for rank, path in asked.files.items():
        times = slow_rank.read(paths.read_private(path, _MOST_BYTES) or b"")
        _remove(path)
        if times is not None:
            found[rank] = times
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and gives no answer
        os.kill(pid, number)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
