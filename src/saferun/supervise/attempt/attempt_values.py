"""The inputs of an attempt, and its observer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from saferun.diagnosis.evidence import Hang
from saferun.model import ProcessLimits

TAIL_BYTES = 256 * 1024


class AttemptSpec(NamedTuple):
    """The command of one attempt, and how it is run.

    `launcher` is "torchrun", which gets its own process group, or "python", which stays in ours, so
    that the terminal's keys reach it directly; torchrun with `no_python` (`--no-python`) stays in
    ours, too.

    SIGUSR1 and SIGUSR2 go to the ranks that have a handler for them (keeper/user_signals.py), or to
    the command if `handled` has them. `receipts` is the directory of the ranks' receipts.
    """

    argv: Sequence[str]  # the first item is looked up in `env`'s PATH
    env: Mapping[str, str]  # the whole environment
    launcher: str = "torchrun"
    no_python: bool = False
    # Seconds from the first signal that asks the job to end until the job is killed; None for no
    # limit. It should be more than the job's own shutdown time.
    grace_s: float | None = None
    tail_bytes: int = TAIL_BYTES  # how many bytes at the end of each stream to keep
    receipts: str | None = None
    handled: Sequence[str] = ()  # signals of the user's --signals-to-handle
    limits: ProcessLimits = ProcessLimits()  # a mitigation's changes to the process
    # Signals that the caller has blocked only for itself: the job does not inherit the block.
    unblocked: frozenset[int] = frozenset()
    gpu_prefix: str = "/dev/nvidia"  # processes with such a path open are ended after success, too

    @property
    def own_group(self) -> bool:
        """Return whether the command gets its own process group."""
        return self.launcher == "torchrun" and not self.no_python


class Observer:
    """What is called while an attempt runs; nothing of it may block. This one does nothing.

    Attributes:
        cause: why the command must be ended, read after a look; None if it may go on.
    """

    cause: Hang | None = None

    def ordered(self) -> None:
        """The keeper has been told to start the command, and does so now."""

    def started(self, keeper: int, launcher: int) -> None:
        """The command runs.

        Args:
            keeper: the pid of the keeper.
            launcher: the pid of the command.
        """

    def cold(self, reason: str) -> None:
        """A prepared warm process did not become the command."""

    def look(self) -> float:
        """Look while the command runs, first at its start; return the seconds until the next."""
        return float("inf")

    def asked(self) -> None:
        """A SIGQUIT came while a command with its own process group runs. `look` is called next."""

    def interrupted(self, left_s: float | None) -> None:
        """The first SIGINT asks the job to end.

        Args:
            left_s: the seconds until it is killed; None for no limit.
        """

    def spared(self) -> Iterable[int]:
        """Return the pids of our children that are no part of the attempt.

        They survive if the keeper is killed and we do its work.
        """
        return ()
