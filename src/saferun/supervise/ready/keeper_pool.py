"""The keeper and the warm agent of the next attempt, started while the current one runs.

A keeper that waits saves 20 ms of an attempt's start. A warm agent has imported torch when its
attempt begins; otherwise that import would take most of the time between two attempts. A failure
here harms nothing: the next attempt then starts as the first one did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from saferun.keeper import output_ends, protocol
from saferun.keeper.output_ends import OutputPipes
from saferun.keeper.process_tree import read_stat
from saferun.supervise.ready import warm_start
from saferun.supervise.ready.warm_start import WarmStart
from saferun.system import cgroup, paths
from saferun.system.descriptors import plug_closed_descriptors

FREE_BYTES = 4 << 30  # a warm agent takes up to 0.6 GB, and the job's own growth comes first
_LOOK_S = 0.005  # between two looks whether it has: it needs some 10 ms, and the run's end waits
END_S = 5.0  # time for a keeper to end that is not needed

# An imported keeper uses its cached byte code, which halves the time of its start. The directory of
# saferun comes last in sys.path, so that no file there shadows the standard library.
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from saferun.keeper import keeper_main; "
    "keeper_main.under_saferun(sys.argv[2], bool(sys.argv[3]), *map(int, sys.argv[4:]))"
)
# Returns what to run before that; where our files have changed it holds the keeper's code.
prologue: Callable[[], str] = str


class Standby(NamedTuple):
    """A keeper that has been started and waits for its attempt."""

    pid: int
    commands: int  # descriptor to write commands to; when it closes the keeper ends
    reports: int  # descriptor to read reports from
    outputs: list[OutputPipes]  # where the job's output can be read should the keeper be killed
    hold: tuple[int, ...] = ()  # descriptors that it keeps open while the attempt lives
    warm: WarmStart | None = None  # the agent that it prepares
    shared: bool = False  # others write to the same output

    def close(self) -> None:
        """Let go of the keeper; one that still has a job ends it now."""
        for fd in (self.commands, self.reports):
            os.close(fd)
        for ends in self.outputs:
            ends.close()

    def release(self, outer: int) -> None:
        """Stop holding the reading end of an output: its writers find that nobody reads it."""
        for ends in [ends for ends in self.outputs if ends.outer == outer]:
            self.outputs.remove(ends)
            ends.close()


def start_keeper(hold: Sequence[int] = (), *, shared: bool = False) -> Standby:
    """Start a keeper for one `run_attempt`. It needs 20 ms to be ready: start it early.

    A keeper that is not used ends when its `commands` is closed, or with this process.

    Args:
        hold: descriptors (locks on what the job uses) that the keeper, but no process of the job,
            keeps open until no process of the attempt lives, even if this process dies.
        shared: other jobs write to the same output: lines are kept whole, and a file is not
            handed to the job, since its end would be theirs, too.

    Raises:
        OSError: no process can be started.
    """
    plug_closed_descriptors()
    for fd in (0, 1, 2):
        os.set_inheritable(fd, True)
    place = os.path.dirname(paths.PACKAGE)
    commands_in, commands = os.pipe()
    reports, reports_out = os.pipe()
    passed = [commands_in, reports_out, *(os.dup(fd) for fd in hold)]
    outputs = output_ends.make(shared=shared)
    for fd in (*passed, *(fd for ends in outputs for fd in ends[1:] if fd >= 0)):
        os.set_inheritable(fd, True)
    arguments = [place, output_ends.encode(outputs), "shared" if shared else "", *map(str, passed)]
    argv = [sys.executable, "-I", "-S", "-c", prologue() + _BOOT, *arguments]
    try:
        # Signals are blocked before the first instruction, so that none ends it: it shares our
        # group until it has one of its own.
        pid = os.posix_spawn(sys.executable, argv, os.environ, setsigmask=range(1, 32))
    except OSError:
        for ends in outputs:
            ends.close()
        raise
    finally:
        for fd in passed:
            os.close(fd)
    kept = [ends.kept() for ends in outputs]
    return Standby(pid, commands, reports, kept, tuple(hold), shared=shared)


def prepare(standby: Standby, warm: WarmStart) -> Standby:
    """Have a waiting keeper start the agent that its attempt will need; does not block.

    The keeper's `run_attempt` uses it if the command allows it (warm_start.difference), and starts
    the command as usual if not, or if the agent did not come up.

    Returns:
        The standby to be passed to `run_attempt`.
    """
    protocol.send(standby.commands, warm_start.command(warm, ignored_signals()))
    return standby._replace(warm=warm)


def fit(standby: Standby, *, own_group: bool) -> Standby:
    """Return a standby that can run a command: this one, or a new one in its place.

    Args:
        standby: may have died.
        own_group: the command gets a process group of its own.

    Raises:
        OSError: no process can be started.
    """
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        lives = os.waitpid(standby.pid, os.WNOHANG) == (0, 0)
        if lives and _is_stopped(standby.pid):  # it would cost the attempt its number
            os.kill(standby.pid, signal.SIGKILL)
            os.waitpid(standby.pid, 0)
        elif lives and (own_group or standby.warm is None or not standby.warm.own_group):
            return standby  # else it has left our group, where the command must stay
    standby.close()
    return start_keeper(standby.hold, shared=standby.shared)


def ignored_signals() -> list[int]:
    """Return what this process, and so the job, ignores."""
    ours = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these for itself
    numbers = [n for n in range(1, signal.SIGRTMIN) if n not in ours]
    return [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN]


class KeeperPool:
    """The keeper that waits for the next attempt, if any, and its warm agent.

    Args:
        hold: descriptors that keepers hold for as long as their attempt lives.
        shared: other jobs write to the same output.
    """

    def __init__(self, hold: Sequence[int], *, shared: bool = False) -> None:
        self._shared = shared
        self._hold = tuple(hold)
        self._standby: Standby | None = None

    def start_keeper(self) -> None:
        """Start a keeper, unless one waits.

        Raises:
            OSError: no process can be started.
        """
        if self._standby is None:
            self._standby = start_keeper(hold=self._hold, shared=self._shared)

    def prepare_warm(self, warm: WarmStart) -> str:
        """Start a warm process for an attempt that is likely to come, where there is memory for it.

        Returns:
            Why there is none; "" where there is one.
        """
        if self._standby and self._standby.warm:
            if not warm_start.difference(self._standby.warm, warm.argv, warm.env):
                return ""
            self.close()
        if not memory_suffices():
            return f"less than {FREE_BYTES >> 30} GiB of memory are free"
        try:
            self.start_keeper()
            assert self._standby is not None
            self._standby = prepare(self._standby, warm)
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        return ""

    def take(self) -> Standby:
        """Hand the keeper over to an attempt.

        Raises:
            OSError: no process can be started.
        """
        self.start_keeper()
        standby, self._standby = self._standby, None
        assert standby is not None
        return standby

    def pids(self) -> list[int]:
        """Return the processes that wait here, which are no part of the attempt that runs."""
        return [self._standby.pid] if self._standby else []

    def close(self) -> None:
        """End the keeper that waits, and wait until it is gone."""
        standby, self._standby = self._standby, None
        if standby is None:
            return
        standby.close()
        limit = time.monotonic() + (0 if _is_stopped(standby.pid) else END_S)
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
            while not os.waitpid(standby.pid, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(standby.pid, signal.SIGKILL)
                    limit += END_S
                time.sleep(_LOOK_S)


def _is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat[1] == "T"


def memory_suffices() -> bool:
    """Return whether the machine and our control group have memory for a warm agent."""
    limits = (_available(), cgroup.memory_left())
    return all(left is None or left >= FREE_BYTES for left in limits)


def _available() -> int | None:
    try:
        with open("/proc/meminfo", "rb") as file:
            rows = (line.split() for line in file)
            return next((int(row[1]) * 1024 for row in rows if row[0] == b"MemAvailable:"), None)
    except (OSError, ValueError):
        return None
