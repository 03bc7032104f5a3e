"""What a run, or one worker of it, stands on and works with."""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.gpu.lock.lock import Held
from saferun.journal.writer import Journal
from saferun.named_tuple import NamedTuple
from saferun.supervise.gpu_gate import GpuCare
from saferun.supervise.ready.keeper_pool import KeeperPool
from saferun.supervise.records.record import Record

Say = Callable[[str], None]


class RunContext(NamedTuple):
    """What a run, or one worker of it, stands on."""

    held: Held  # its locks
    journal: Journal
    say: Say
    # Called at the end with the reason and the last attempt.
    over: Callable[[str, AttemptOutcome | None], None]
    worker: bool = False  # others write to the same output; the run has been announced


class RunResources(NamedTuple):
    """What a run works with."""

    context: RunContext
    keepers: KeeperPool  # for the next attempt
    care: GpuCare
    record: Record


def jitter() -> float:
    """Return a random number from 0 to 1, which spreads the retries of several runs."""
    return os.urandom(1)[0] / 255  # `random` costs 5 ms to import
