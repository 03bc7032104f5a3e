"""The record of an attempt that has ended. The loop makes it once; all later code reads it.

The policies that decide on the next attempt, the messages, the nodes of a run, its journal, the
reports and the Python API read this one value. journal/event_types.py says which of its fields are
written to disk.
"""

from __future__ import annotations

from typing import NamedTuple

from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import NoNumber
from saferun.diagnosis.work_lost import Saved, WorkLost

SUCCEEDED, FAILED, ASKED, REPLACED = "succeeded", "failed", "asked", "replaced"


class Decision(NamedTuple):
    """What the loop does after an attempt."""

    action: str = ""  # "again", "stop", "done"; "" where a journal does not tell it
    reason: str = ""  # one clause for people
    delay_s: float = 0.0  # before the next attempt
    add: str = ""  # the mitigation that the next attempt gets on top of those in force
    untried: tuple[str, ...] = ()  # mitigations of the same kind that are left after that


class AttemptOutcome(NamedTuple):
    """One attempt that has ended.

    From a journal, it may also be one of which only the start is known.

    A journal has of the diagnosis what cannot be looked up by its kind.
    """

    number: int  # 1, 2, …
    # The launcher's status, 128+n for a signal. None if a journal does not have it: the attempt is
    # running, or its end was not recorded.
    exit_code: int | None = None
    lived_s: float = 0.0  # from the launcher's start to its end
    ended_s: float = 0.0  # from the start of the first attempt to the end of this one
    diagnosis: Diagnosis = Diagnosis("no-failure")
    offered: tuple[str, ...] = ()  # mitigations of the kind, cheapest first
    fingerprint: str = ""
    mitigations: tuple[str, ...] = ()  # those in force
    waits: bool = False  # the failure passes with time: wait before the retry
    # How it ended: SUCCEEDED, FAILED, ASKED (a signal from outside ended it, whatever its status),
    # REPLACED (its process asked for a new one); "" from a journal.
    way: str = ""
    first_step: int | None = None  # the first training step in its output
    last_step: int | None = None  # the last training step in its output
    progressed: bool = False  # it made progress: trials, or a checkpoint beyond all earlier ones
    replaced_for: str = ""  # why its process asked for a new one
    launcher_end: str = ""  # the signal that ended its first process, in words
    falls_back: bool = False  # its checkpoint could not be loaded, and an older one exists
    has_room: bool = False  # its disk was full, and there is now room for a checkpoint
    no_number: NoNumber | None = None  # why the watch on its loss ended it
    ended_by: str = ""  # "job", "grace", "interrupt", "keeper", "hang", "loss"
    signals: tuple[str, ...] = ()  # names of the signals that were passed on to it
    killed: int = 0  # processes that had to be killed
    unkillable: tuple[int, ...] = ()  # pids of processes that the kernel could not end
    lost_work: WorkLost | None = None  # work since the last checkpoint; None if unknown
    saved: tuple[Saved, ...] = ()  # checkpoints that it wrote and that still exist
    decision: Decision = Decision()  # the one that followed

    @property
    def has_ended(self) -> bool:
        """Return whether the attempt's end is known."""
        return self.exit_code is not None

    @property
    def kind(self) -> str:
        """The kind of its failure."""
        return self.diagnosis.kind

    @property
    def root_rank(self) -> int | None:
        """The rank on which it failed; None where it is not known."""
        return self.diagnosis.root_rank
