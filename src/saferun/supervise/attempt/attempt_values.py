"""What an attempt is started with, who is told of it, and how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from saferun.keeper import protocol
from saferun.model import ProcessLimits

TAIL_BYTES = 256 * 1024


class AttemptSpec(NamedTuple):
    """What one attempt runs, and how.

    `launcher` is "torchrun", which gets a process group of its own, or "python", which stays in
    ours, so that the terminal's keys reach it directly; so does torchrun with `no_python`
    (`--no-python`).

    SIGUSR1 and SIGUSR2 go to the ranks that have a handler for them (keeper/user_signals.py), but
    to the command where `handled` has them. `receipts` is where ranks leave their receipts.
    """

    argv: Sequence[str]  # the first word is looked up in `env`'s PATH
    env: Mapping[str, str]  # the whole environment
    launcher: str = "torchrun"
    no_python: bool = False
    # Seconds from the first signal that asks the job to end until it is killed; None for no limit.
    # Give it more than the job's own shutdown time.
    grace_s: float | None = None
    tail_bytes: int = TAIL_BYTES  # how much of the end of each stream to keep
    receipts: str | None = None
    handled: Sequence[str] = ()  # the signals of the user's --signals-to-handle
    limits: ProcessLimits = ProcessLimits()  # what a mitigation changes for the process
    # Signals that the caller has blocked for itself: the job does not find them blocked.
    unblocked: frozenset[int] = frozenset()
    gpu_prefix: str = "/dev/nvidia"  # who has a path like this open is ended after success, too

    @property
    def own_group(self) -> bool:
        """Whether the command gets a process group of its own."""
        return self.launcher == "torchrun" and not self.no_python


class Observer(NamedTuple):
    """What is called while an attempt runs. Nothing of it may block."""

    # When the keeper has been told to start the command, which it does meanwhile.
    ordered: Callable[[], object] = lambda: None
    # With the pids of the keeper and of the command, when it has been started.
    started: Callable[[int, int], object] = lambda keeper, launcher: None
    # With why a warm process did not become the command, where one waited.
    cold: Callable[[str], object] = lambda reason: None
    # `later_s` seconds after the start, if the command still runs: the time to make the next
    # attempt's keeper ready. Returns the seconds until it is called again; None: never.
    later: Callable[[], float | None] = lambda: None
    later_s: float = 0.0
    # Again and again while the command runs; returns the seconds until the next time, or None to
    # have the command ended, because it hangs.
    check_job: Callable[[], float | None] = lambda: float("inf")
    # At a SIGQUIT while a command runs that has a group of its own; `check_job` is called next.
    asked: Callable[[], object] = lambda: None
    # At the first SIGINT that asks the job to end, with the seconds until it is killed.
    interrupted: Callable[[float | None], object] = lambda left_s: None
    # Returns the pids of children of ours that are no part of the attempt: they live on should the
    # keeper be killed and its work fall to us.
    spared: Callable[[], Iterable[int]] = tuple


class Ended(NamedTuple):
    """How an attempt ended."""

    report: protocol.Ended  # the keeper's; its wait status is SIGKILL where it was not learned
    started_at: float  # seconds since the epoch
    lived_s: float  # the time from the launcher's start to its end
    forwarded: tuple[str, ...]  # "SIGTERM", in order
    interrupted: bool  # a signal asked us to end
    # "job", "interrupt" (a second Ctrl-C), "grace" (out of time), "keeper" (killed), "hang"
    ended_by: str
    asked_s: float | None = None  # time from the last signal to the end; None: no signal came
    keeper: str = ""  # what became of the keeper, for people, where that ended the attempt
    by_interrupt: bool = False  # a SIGINT asked us to end

    @property
    def signal(self) -> int | None:
        """The signal that the launcher died of, if it did."""
        status = self.report.wait_status
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None

    @property
    def exit_code(self) -> int:
        """The exit status as a shell gives it: 128+n for a signal; 130 after a second Ctrl-C."""
        if self.ended_by == "interrupt":
            return 128 + signal.SIGINT
        return 128 + self.signal if self.signal else os.WEXITSTATUS(self.report.wait_status)
