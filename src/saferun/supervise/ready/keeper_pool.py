"""The keeper and the warm agent of the next attempt, started while the current one runs.

A waiting keeper saves 20 ms at an attempt's start. A warm agent has imported torch before its
attempt begins; otherwise that import would take most of the time between two attempts. A failure
here does no harm: the next attempt then starts as the first one did.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from saferun.base import proc
from saferun.keeper import libc_signals, output_ends, protocol
from saferun.keeper.output_ends import OutputPipes
from saferun.keeper.process_tree import read_stat
from saferun.supervise.ready import warm_start
from saferun.supervise.ready.warm_start import WarmStart
from saferun.system import cgroup, paths

FREE_BYTES = 4 << 30  # a warm agent takes up to 0.6 GB, and the job's own growth comes first
_LOOK_S = 0.005  # between two checks whether it has ended: some 10 ms, which delay the run's end
_IGNORED_OF_LIBC = libc_signals.ignored()  # now: glibc handles 33 once there is a thread
END_S = 5.0  # for the end of a keeper that is not needed

# A keeper that is imported uses cached byte code, which halves its start time. saferun's directory
# comes last in sys.path, so that no file in it shadows the standard library.
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from saferun.keeper import keeper_main; "
    "keeper_main.under_saferun(sys.argv[2], bool(sys.argv[3]), *map(int, sys.argv[4:]))"
)
# Returns code to run first; if our files have changed, it contains the keeper's code.
prologue: Callable[[], str] = str


class Standby(NamedTuple):
    """A started keeper that waits for its attempt."""

    pid: int
    commands: int  # descriptor for commands to the keeper; it ends when this closes
    reports: int  # descriptor for its reports
    outputs: list[OutputPipes]  # reading ends of the job's output, in case the keeper is killed
    hold: tuple[int, ...] = ()  # descriptors that the keeper holds while the attempt lives
    warm: WarmStart | None = None  # the agent that it prepares
    shared: bool = False  # others write to the same output

    def close(self) -> None:
        """Close the keeper's descriptors; it ends now, with any job that it still has."""
        for fd in (self.commands, self.reports):
            os.close(fd)
        for ends in self.outputs:
            ends.close()

    def release(self, outer: int) -> None:
        """Close the reading end of an output, so that its writers notice that nobody reads it."""
        for ends in [ends for ends in self.outputs if ends.outer == outer]:
            self.outputs.remove(ends)
            ends.close()


def start_keeper(hold: Sequence[int] = (), *, shared: bool = False) -> Standby:
    """Start a keeper for one `run_attempt`. It is ready after 20 ms, so start it early.

    An unused keeper ends when its `commands` is closed, or with this process.

    Args:
        hold: descriptors (locks on what the job uses) that the keeper keeps open, and no process of
            the job inherits, until no process of the attempt lives, even if this process dies.
        shared: other jobs write to the same output: lines are kept whole, and the job does not get
            a file directly, since its end would contain their output, too.

    Raises:
        OSError: no process can be started.
    """
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
        # Signals are blocked before the first instruction, so that none ends the keeper: it shares
        # our process group until it has its own.
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
    """Let a waiting keeper start the agent that its attempt will need; does not block.

    `run_attempt` uses the agent if the command allows it (warm_start.difference). Otherwise, or if
    the agent did not start, the command is started as usual.

    Returns:
        The standby for `run_attempt`.
    """
    protocol.send(standby.commands, warm_start.command(warm, ignored_signals()))
    return standby._replace(warm=warm)


def fit(standby: Standby, *, own_group: bool) -> Standby:
    """Return a standby that can run a command: the given one, or a new one.

    Args:
        standby: the standby, which may have died.
        own_group: the command gets its own process group.

    Raises:
        OSError: no process can be started.
    """
    with contextlib.suppress(ChildProcessError):  # if SIGCHLD is ignored
        lives = os.waitpid(standby.pid, os.WNOHANG) == (0, 0)
        if lives and _is_stopped(standby.pid):  # it would waste one of the attempts
            os.kill(standby.pid, signal.SIGKILL)
            os.waitpid(standby.pid, 0)
        elif lives and (own_group or standby.warm is None or not standby.warm.own_group):
            return standby  # otherwise it has left our group, in which the command must stay
    standby.close()
    return start_keeper(standby.hold, shared=standby.shared)


def ignored_signals() -> list[int]:
    """Return the signals that this process, and so the job, ignores."""
    ours = (signal.SIGPIPE, signal.SIGXFSZ)  # Python itself ignores these
    numbers = [n for n in range(1, signal.SIGRTMIN) if n not in ours]
    ignored = [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN]
    return [*ignored, *_IGNORED_OF_LIBC]


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
        """Start a keeper, unless one is waiting.

        Raises:
            OSError: no process can be started.
        """
        if self._standby is None:
            self._standby = start_keeper(hold=self._hold, shared=self._shared)

    def prepare_warm(self, warm: WarmStart) -> str:
        """Start a warm process for an attempt that is likely to come, if there is memory for it.

        Returns:
            The reason if there is none; "" if there is one.
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
        """Return the pids of waiting processes, which are not part of the running attempt."""
        return [self._standby.pid] if self._standby else []

    def close(self) -> None:
        """End the waiting keeper, and wait until it is gone."""
        standby, self._standby = self._standby, None
        if standby is None:
            return
        standby.close()
        limit = time.monotonic() + (0 if _is_stopped(standby.pid) else END_S)
        with contextlib.suppress(ChildProcessError):  # if SIGCHLD is ignored
            while not os.waitpid(standby.pid, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(standby.pid, signal.SIGKILL)
                    limit += END_S
                time.sleep(_LOOK_S)


def _is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat[1] == "T"


def memory_suffices() -> bool:
    """Return whether the machine and our control group have enough memory for a warm agent."""
    limits = (_available(), cgroup.memory_left())
    return all(left is None or left >= FREE_BYTES for left in limits)


def _available() -> int | None:
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", proc.text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
