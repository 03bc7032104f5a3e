"""The running attempt, as its watches need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.silence import Longest
from saferun.model import Checkpoint, LaunchPlan
from saferun.supervise.records.record import Record
from saferun.supervise.watch.live_job import LiveJob


@dataclass(frozen=True, slots=True)
class RunningJob(LiveJob):
    """One running attempt: what can be seen of it, and what its run knows."""

    plan: LaunchPlan
    number: int
    history: Sequence[AttemptOutcome]  # the attempts before it
    receipts: str | None  # the directory of the ranks' receipts
    record: Record
    longest: Longest  # longest silences of the run so far
    saved_before: Callable[[float], Checkpoint | None]  # the newest checkpoint from before a time
    say: Callable[[str], None]
    environ: Mapping[str, str]  # the user's environment
