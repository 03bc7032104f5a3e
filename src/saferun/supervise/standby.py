"""Start a keeper ahead of the attempt that it will keep, and have it prepare.

A keeper that waits takes 20 ms off an attempt's start; one that has been told of a spare has torch
imported when its task comes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from saferun.keeper import protocol
from saferun.system import paths
from saferun.system.descriptors import plug_closed_descriptors

if TYPE_CHECKING:
    from saferun.keeper.warm_agent import Spare

# Imported, the keeper comes from its cached byte code, which halves the time of its start. The
# directory of saferun comes last, so that nothing beside it shadows the standard library.
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from saferun.keeper import keeper; "
    "keeper.under_saferun(*map(int, sys.argv[2:]))"
)


class Standby(NamedTuple):
    """A keeper that has been started and waits for its task."""

    pid: int
    commands: int  # descriptor to write commands to; when it closes the keeper ends
    reports: int  # descriptor to read reports from
    hold: tuple[int, ...] = ()  # what it holds for as long as the attempt's processes live
    spare: Spare | None = None  # what it has been told to make ready


def start_keeper(hold: Sequence[int] = ()) -> Standby:
    """Start a keeper for one `run_attempt`, which takes 20 ms to be ready: do it early.

    A keeper that is not used ends when its `commands` is closed, or with this process.

    Args:
        hold: descriptors that the keeper, and nobody of the job, keeps open until no process of
            the attempt lives, whatever becomes of us: locks on what the job uses.
    """
    plug_closed_descriptors()
    for fd in (0, 1, 2):
        os.set_inheritable(fd, True)
    place = os.path.dirname(paths.PACKAGE)
    commands_in, commands = os.pipe()
    reports, reports_out = os.pipe()
    passed = [commands_in, reports_out, *(os.dup(fd) for fd in hold)]
    for fd in passed:
        os.set_inheritable(fd, True)
    words = ["-I", "-S", "-c", _BOOT, place, *map(str, passed)]
    try:
        # Deaf from its first moment: it shares our group until it has one of its own.
        pid = os.posix_spawn(
            sys.executable, [sys.executable, *words], os.environ, setsigmask=range(1, 32)
        )
    finally:
        for fd in passed:
            os.close(fd)
    return Standby(pid, commands, reports, tuple(hold))


def prepare(standby: Standby, spare: Spare) -> Standby:
    """Have a waiting keeper start the interpreter that its task will need; does not block.

    The keeper's `run_attempt` uses it if the task allows it (spare.usable), and starts the command
    as usual if not, or if the interpreter did not come up.

    Returns:
        The standby to be passed to `run_attempt`.
    """
    from saferun.keeper.warm_agent import order

    protocol.send(standby.commands, ("prepare", {**order(spare), "ignored": ignored_signals()}))
    return standby._replace(spare=spare)


def ignored_signals() -> list[int]:
    """Return what this process, and so the job, ignores."""
    ours = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these for itself
    numbers = [n for n in range(1, signal.SIGRTMIN) if n not in ours]
    return [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN]
