"""How an attempt ended, whether a signal ended it, and the time that its job gets to end."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from saferun.keeper import protocol
from saferun.model import LaunchPlan

INTERRUPTED = 128 + signal.SIGINT
_SHUTDOWN_S = 30  # torchrun's own limit for its workers (--shutdown-timeout)
_MARGIN_S = 10.0  # extra time for torchrun to end


class AttemptEnd(NamedTuple):
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
            return INTERRUPTED
        return 128 + self.signal if self.signal else os.WEXITSTATUS(self.report.wait_status)

    @property
    def end_requested(self) -> bool:
        """Return whether a signal ended it; after SIGUSR1 or SIGUSR2 most ranks continue."""
        soon = _SHUTDOWN_S + _MARGIN_S
        return self.interrupted or (self.asked_s is not None and self.asked_s <= soon)

    def status(self, *, torchrun: bool) -> int:
        """Return the status of a run that ends with it: 130 after a SIGINT to torchrun.

        torchrun itself then has status 1; a Python that handles SIGINT has its own status.

        Args:
            torchrun: whether torchrun started the job.
        """
        return INTERRUPTED if torchrun and self.by_interrupt and self.exit_code else self.exit_code


def grace_s(plan: LaunchPlan) -> float | None:
    """Return the seconds from a signal until the job is killed; None: no limit.

    torchrun ends its workers within its own limit; plain python has no limit, with or without us.
    """
    if plan.launcher != "torchrun":
        return None
    given = plan.options.shutdown_timeout_s
    return (_SHUTDOWN_S if given is None or given < 0 else given) + _MARGIN_S
