"""What works beside an attempt, a little at a time, and the only scheduler of it.

Nearly all that saferun does while a job runs is such a part: it keeps its own files and the sign of
life in the journal, prepares the next attempt, and watches the ranks. The job needs none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from saferun.diagnosis.evidence import Hang
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.faults import contained

NEVER_S = float("inf")  # for a part that looks no more
LOAD_S = 0.5  # after the start, which imports for the end must not delay
PREPARE_S = 5.0  # after the start: ranks are up, and the next attempt is prepared
_SELDOM_S = 30.0  # longest time between two looks of what looks more seldom with time


class Beside:
    """A part of saferun that works beside an attempt.

    Attributes:
        again_s: seconds until its next look after a fault of saferun itself.
        cause: why the attempt must end; None for no reason.
        told_of_hooks: whether the user knows already that hooks do not run in some ranks.
    """

    again_s = NEVER_S
    cause: Hang | None = None
    told_of_hooks = False

    @property
    def stall(self) -> Hang | None:
        """Return a rank that others wait for, or waited for shortly before."""
        return None

    @property
    def idle(self) -> tuple[tuple[float, float], ...]:
        """Return when all ranks only waited, from and until, in seconds since the epoch."""
        return ()

    def look(self) -> float:
        """Do what is due; return the seconds until the next look."""
        raise NotImplementedError

    def asked(self) -> bool:
        """A person asks where the ranks are; return whether it looks at once."""
        return False

    def ended(self, ended: AttemptEnd) -> None:
        """The attempt has ended."""


class Looks:
    """All that works beside one attempt, each part with its own interval between looks.

    Args:
        fault: function that notes a fault of saferun itself; the job goes on.
    """

    def __init__(self, fault: Callable[[Exception], object]) -> None:
        self._fault = fault
        self._next_s: dict[Beside, float] = {}

    def add(self, *parts: Beside, after_s: float = 0.0) -> None:
        """Add parts, with the seconds until their first look."""
        self._next_s.update(dict.fromkeys(parts, time.monotonic() + after_s))

    @property
    def cause(self) -> Hang | None:
        """Return why the attempt must end."""
        return next((part.cause for part in self._next_s if part.cause), None)

    @property
    def stall(self) -> Hang | None:
        """Return a rank that others waited for when the attempt ended."""
        return next((part.stall for part in self._next_s if part.stall), None)

    @property
    def idle(self) -> tuple[tuple[float, float], ...]:
        """Return when all ranks only waited, from and until, in seconds since the epoch."""
        return next((part.idle for part in self._next_s if part.idle), ())

    @property
    def told_of_hooks(self) -> bool:
        """Return whether the user knows already that hooks do not run in some ranks."""
        return any(part.told_of_hooks for part in self._next_s)

    def look(self) -> float:
        """Let those look that are due; return the seconds until the next look."""
        now = time.monotonic()
        for part, next_s in self._next_s.items():
            if now >= next_s:
                self._next_s[part] = now + contained(part.look, part.again_s, self._fault)
                if part.cause:
                    break  # the attempt ends
        return max(0.0, min(self._next_s.values(), default=NEVER_S) - now)

    def asked(self) -> None:
        """A person asks where the ranks are."""
        for part in self._next_s:
            if contained(part.asked, otherwise=False, tell=self._fault):
                self._next_s[part] = 0.0

    def ended(self, ended: AttemptEnd) -> None:
        """The attempt has ended."""
        for part in self._next_s:
            contained(lambda part=part: part.ended(ended), None, self._fault)  # type: ignore[misc]


def seldom_s(began_s: float) -> float:
    """Return the seconds until a next look that comes more seldom the longer an attempt runs.

    Args:
        began_s: when the attempt started, on the monotonic clock.
    """
    return min(_SELDOM_S, max(PREPARE_S, (time.monotonic() - began_s) / 4))
