"""What the next attempt needs is made ready while this one runs: its keeper, and a spare torchrun.

Most of the time between two attempts would be theirs. Trouble here is none: without them the next
attempt starts as the first one did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

from saferun.keeper.warm_agent import offer
from saferun.plan.torchrun_install import Launcher
from saferun.supervise.standby import Standby, prepare, start_keeper

ROOM_BYTES = 4 << 30  # a spare takes up to 0.6 GB, and the job's own growth comes first
END_S = 5.0


class Ready:
    """The keeper of the next attempt, where there is one.

    Args:
        launcher: what a spare would be one of; None for none.
        hold: descriptors that keepers hold for as long as their attempt lives.
    """

    def __init__(self, launcher: Launcher | None, hold: Sequence[int]) -> None:
        self._launcher = launcher
        self._hold = tuple(hold)
        self._standby: Standby | None = None

    def keeper(self) -> None:
        """Start a keeper, unless one waits.

        Raises:
            OSError: no process can be started.
        """
        if self._standby is None:
            self._standby = start_keeper(hold=self._hold)

    def spare(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Have a torchrun wait that has imported torch, for a command that is likely to come."""
        try:
            self.keeper()
            spare = offer(self._launcher, argv, env) if self._launcher else None
            if spare and self._standby and has_room():
                self._standby = prepare(self._standby, spare)
        except OSError:
            return

    def take(self) -> Standby:
        """Hand the keeper over to an attempt.

        Raises:
            OSError: no process can be started.
        """
        self.keeper()
        standby, self._standby = self._standby, None
        assert standby is not None
        return standby

    def pids(self) -> list[int]:
        """Return the processes that wait here: they are no part of the attempt that runs."""
        return [self._standby.pid] if self._standby else []

    def drop(self) -> None:
        """End what waits, and see it gone."""
        standby, self._standby = self._standby, None
        if standby is None:
            return
        os.close(standby.commands)
        os.close(standby.reports)
        limit = time.monotonic() + END_S
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
            while not os.waitpid(standby.pid, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(standby.pid, signal.SIGKILL)
                    limit += END_S
                time.sleep(0.005)


def has_room() -> bool:
    """Return whether the machine and our control group have memory for a spare."""
    limits = [_available(), *(_left(*names) for names in _group_files())]
    return all(left is None or left >= ROOM_BYTES for left in limits)


def _available() -> int | None:
    try:
        with open("/proc/meminfo", "rb") as file:
            rows = (line.split() for line in file)
            return next((int(row[1]) * 1024 for row in rows if row[0] == b"MemAvailable:"), None)
    except (OSError, ValueError):
        return None


def _group_files() -> list[tuple[str, str]]:
    """Return limit and usage of the control group, version 2 and 1, as a container sees them."""
    two, one = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
    return [
        (f"{two}/memory.max", f"{two}/memory.current"),
        (f"{one}/memory.limit_in_bytes", f"{one}/memory.usage_in_bytes"),
    ]


def _left(limit: str, usage: str) -> int | None:
    try:
        with open(limit, encoding="ascii") as first, open(usage, encoding="ascii") as second:
            return int(first.read()) - int(second.read())
    except (OSError, ValueError):  # no such group, or "max"
        return None
