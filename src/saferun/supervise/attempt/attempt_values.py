"""The inputs of an attempt, its observer, and how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from saferun.keeper import protocol
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


class Observer(NamedTuple):
    """Functions that are called while an attempt runs. None of them may block."""

    # Called when the keeper has been told to start the command, while it does so.
    ordered: Callable[[], object] = lambda: None
    # Called with the pids of the keeper and of the command when the command has been started.
    started: Callable[[int, int], object] = lambda keeper, launcher: None
    # Called with the reason if a prepared warm process did not become the command.
    cold: Callable[[str], object] = lambda reason: None
    # Called `later_s` seconds after the start if the command still runs, to prepare the next
    # attempt's keeper. It returns the seconds until it is called again; None: never.
    later: Callable[[], float | None] = lambda: None
    later_s: float = 0.0
    # Called repeatedly while the command runs. It returns the seconds until the next call, or None
    # to have the command ended because it hangs.
    check_job: Callable[[], float | None] = lambda: float("inf")
    # Called at a SIGQUIT while a command with its own process group runs; `check_job` is called
    # next.
    asked: Callable[[], object] = lambda: None
    # Called at the first SIGINT that asks the job to end, with the seconds until it is killed.
    interrupted: Callable[[float | None], object] = lambda left_s: None
    # Returns the pids of our children that are no part of the attempt: they survive if the keeper
    # is killed and we do its work.
    spared: Callable[[], Iterable[int]] = tuple


class Ended(NamedTuple):
    """How an attempt ended."""

    report: protocol.Ended  # the keeper's; its wait status is SIGKILL where it was not learned
    started_at: float  # seconds since the epoch
    lived_s: float  # seconds from the launcher's start to its end
    forwarded: tuple[str, ...]  # "SIGTERM", in order
    interrupted: bool  # a signal asked us to end
    # "job", "interrupt" (a second Ctrl-C), "grace" (out of time), "keeper" (killed), "hang"
    ended_by: str
    asked_s: float | None = None  # seconds from the last signal to the end; None: no signal came
    keeper: str = ""  # what happened to the keeper, for people, if that ended the attempt
    by_interrupt: bool = False  # a SIGINT asked us to end

    @property
    def signal(self) -> int | None:
        """Return the signal that the launcher died of; None if none."""
        status = self.report.wait_status
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None

    @property
    def exit_code(self) -> int:
        """Return the exit status as in a shell: 128+n for a signal; 130 after a second Ctrl-C."""
        if self.ended_by == "interrupt":
            return 128 + signal.SIGINT
        return 128 + self.signal if self.signal else os.WEXITSTATUS(self.report.wait_status)
