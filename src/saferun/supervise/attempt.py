"""Run one attempt of a job under a keeper (keeper/keeper.py), and come back when nothing of it is
left.

This side forwards signals, minds the time that a job is given to end, looks after the terminal's
settings, and takes the keeper's place should that be killed. The keeper's side owns the processes
and carries the output.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from saferun.keeper import protocol
from saferun.supervise.standby import Standby, ignored_signals, start_keeper
from saferun.system.descriptors import plug_closed_descriptors

if TYPE_CHECKING:
    from saferun.keeper.warm_agent import Spare

TAIL_BYTES = 256 * 1024
_DEATH_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_TERMINAL_SIGNALS = (signal.SIGWINCH, signal.SIGCONT)  # after `fg` the window may be another
_SAME_KEYPRESS_S = 0.1  # wrappers repeat a Ctrl-C that the terminal has sent already
_READER_GRACE_S = 10.0  # for the rest of the output, where a job has ended because it was asked to
_KEEPER_GRACE_S = 5.0  # what a keeper may need beyond the time for processes that do not die


class Ended(NamedTuple):
    """How an attempt ended."""

    wait_status: int  # as waitpid(2) gives it; SIGKILL where it could not be learned
    started_at: float  # seconds since the epoch
    lived_s: float  # from the start of the launcher to its end
    stdout_tail: bytes
    stderr_tail: bytes  # empty where both are one terminal, pipe or file: it is in stdout_tail
    merged: bool  # stdout and stderr were one
    forwarded: tuple[str, ...]  # "SIGTERM", in order
    interrupted: bool  # a signal asked us to end
    ended_by: str  # "job", "interrupt" (a second Ctrl-C), "grace" (its time was over), "keeper"
    killed: int  # processes that were left over and were killed
    unkillable: tuple[int, ...]  # processes that the kernel would not kill
    heads: tuple[bytes, bytes] = (b"", b"")  # the beginning of stdout and of stderr
    asked_s: float | None = None  # from the last signal for the job to its end; None: no signal

    @property
    def signal(self) -> int | None:
        """The signal that the launcher died of, if it did."""
        return os.WTERMSIG(self.wait_status) if os.WIFSIGNALED(self.wait_status) else None

    @property
    def exit_code(self) -> int:
        """The exit status as a shell says it: 128+n for a signal; 130 after a second Ctrl-C."""
        if self.ended_by == "interrupt":
            return 128 + signal.SIGINT
        return 128 + self.signal if self.signal else os.WEXITSTATUS(self.wait_status)


def run_attempt(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    launcher: str = "torchrun",
    no_python: bool = False,
    grace_s: float | None = None,
    tail_bytes: int = TAIL_BYTES,
    receipts: str | None = None,
    limits: Mapping[str, Any] | None = None,
    standby: Standby | None = None,
    on_start: Callable[[int, int], object] | None = None,
    later: Callable[[], object] | None = None,
    later_s: float = 0.0,
    spared: Callable[[], Iterable[int]] = tuple,
    gpu_prefix: str = "/dev/nvidia",
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
) -> Ended:
    """Start a command under supervision and wait until nothing of it is left.

    Call it in the main thread and before other threads start (see signals.Signals). Signals act
    again as they did before when it returns.

    Args:
        argv: the command; its first word is looked up in `env`'s PATH.
        env: its whole environment.
        launcher: "torchrun", which gets a process group of its own, or "python", which stays in
            ours, so that the terminal's keys reach it directly.
        no_python: torchrun's `--no-python` was given; the command stays in our group, too.
        grace_s: seconds from the first signal that asks the job to end until it is killed; None
            for no limit. Give it more than the job's own shutdown time.
        tail_bytes: how much of the end of each stream to keep.
        receipts: where ranks leave their receipts. SIGUSR1 and SIGUSR2 go to torchrun if it has a
            handler for them (`--signals-to-handle`), else to those of these ranks that have one.
        limits: what a mitigation changes for the process: `nofile`, the soft limit of open files,
        raised
            as far as the hard one allows; `ignore`, names of signals.
        standby: what `start_keeper` or `prepare` returned, where they were called ahead to save
            the time that it takes. One that has died is replaced.
        on_start: called with the pids of the keeper and of the command.
        later: called once, `later_s` seconds after the start, if the attempt still runs; it must
            not block. The time to make the next attempt's keeper ready.
        spared: pids of children of ours that are no part of the attempt and live on should the
            keeper be killed and its work fall to us.
        gpu_prefix: who has a path with this beginning open is ended after success, too.
        clock: seconds for durations; now: seconds since the epoch.

    Raises:
        UnavailableError: the command could not be started.
    """
    from saferun.system.signalfd import Signals

    plug_closed_descriptors()  # or the one for signals would become the job's output
    modes = _Modes()
    with Signals((*_DEATH_SIGNALS, *_USER_SIGNALS, *_TERMINAL_SIGNALS)) as signals:
        apart = launcher == "torchrun" and not no_python
        attempt = _Attempt(signals, apart, grace_s, clock, receipts)
        attempt.later = (later_s, later) if later else None
        started_at = now()
        try:
            task = _task(argv, env, signals, apart, tail_bytes, gpu_prefix)
            task = _limited(task, limits or {})
            standby = _fresh(standby, apart) if standby else start_keeper()
            attempt.start(standby, {**task, "spare": _fits(standby.spare, task)})
            attempt.wait(on_start)
            attempt.settle(spared)
        finally:
            attempt.close()
            modes.restore()
        return attempt.result(started_at)


def _fresh(standby: Standby, apart: bool) -> Standby:
    """Return a standby that can take the task: this one, or another in its place."""
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        lives = os.waitpid(standby.pid, os.WNOHANG) == (0, 0)
        if lives and (apart or standby.spare is None):
            return standby  # with a spare it has left our group, where python's child must stay
    for fd in (standby.commands, standby.reports):
        os.close(fd)
    return start_keeper(standby.hold)


def _fits(spare: Spare | None, task: Mapping[str, Any]) -> bool:
    """Return whether a spare interpreter may become the task's command."""
    if spare is None or task["own"] != "group" or task["blocked"]:
        return False
    if task["nofile"] or task["ignored"] != ignored_signals():
        return False  # a mitigation changes how the process starts
    from saferun.keeper.warm_agent import usable

    return usable(spare.env, task["env"], spare.argv, task["argv"])


def _task(
    argv: Sequence[str],
    env: Mapping[str, str],
    signals: Any,
    apart: bool,
    tail_bytes: int,
    gpu_prefix: str,
) -> dict[str, Any]:
    return {
        "argv": list(argv),
        "env": dict(env),
        "own": "group" if apart else "",
        "ignored": ignored_signals(),
        "blocked": [int(n) for n in signals.blocked_before],
        "tail_bytes": tail_bytes,
        "gpu_prefix": gpu_prefix,
    }


def _limited(task: dict[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    ignored = [int(signal.Signals[name]) for name in limits.get("ignore", ())]
    return {**task, "ignored": [*task["ignored"], *ignored], "nofile": limits.get("nofile")}


class _Attempt:
    """One running attempt, seen from our side."""

    def __init__(
        self,
        signals: Any,
        apart: bool,
        grace_s: float | None,
        clock: Callable[[], float],
        receipts: str | None,
    ) -> None:
        self._signals = signals
        self._apart = apart
        self._grace_s = grace_s
        self._clock = clock
        self._receipts = receipts
        self.later: tuple[float, Callable[[], object]] | None = None
        self._later_at: float | None = None
        self._asked_at: float | None = None
        self._ended_at: float | None = None
        self._keeper = 0
        self._commands = self._reports = -1
        self._inbox: Any = None
        self._began = clock()
        self._lived_s = 0.0
        self._started = self._exited = False
        self._last: list[Any] | None = None  # the keeper's last message
        self._deadline: float | None = None
        self._killing = False
        self._interrupts: list[float] = []
        self._asked = False
        self._must_end = False  # asked by what no job takes and goes on from
        self._forwarded: list[str] = []
        self._ended_by = "job"

    def start(self, standby: Standby, task: Mapping[str, Any]) -> None:
        """Tell the keeper what to do."""
        self._keeper, self._commands, self._reports = standby[:3]
        from saferun.keeper import (
            process_tree,  # its ctypes is loaded while the keeper does the same
        )

        process_tree.become_subreaper()
        self._inbox = protocol.Inbox(self._reports)
        self._send(dict(task))

    def wait(self, on_start: Callable[[int, int], object] | None) -> None:
        """Do what comes until the keeper has said its last word or is dead."""
        poller = select.poll()
        poller.register(self._signals.fd, select.POLLIN)
        poller.register(self._inbox.fd, select.POLLIN)
        while self._last is None and not self._inbox.closed:
            ready = [fd for fd, _ in poller.poll(self._left_ms())]
            if self._inbox.fd in ready:
                for message in self._inbox.read():
                    self._hear(message, on_start)
            if self._signals.fd in ready:
                for number, sender in self._signals.read():
                    self._signal(number, sender)
            self._mind_the_time()

    def settle(self, spared: Callable[[], Iterable[int]]) -> None:
        """Wait for the keeper's own end, and do its work if it was killed.

        Raises:
            UnavailableError: the command could not be started.
        """
        lingers = self._last is not None and self._last[-1] is True
        if not lingers:  # else it stays, for what the job left behind on purpose
            with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
                os.waitpid(self._keeper, 0)
        if self._last is None:
            self._last = self._take_over(spared)
        elif self._last[0] == "failed":
            raise _cannot_start(self._last)

    def close(self) -> None:
        """Let go of the keeper; one that still has a job ends it now."""
        for fd in (self._commands, self._reports):
            if fd >= 0:
                os.close(fd)

    def result(self, started_at: float) -> Ended:
        """Return how it ended, signals of the last moment included."""
        assert self._last is not None
        if any(number in _DEATH_SIGNALS for number, _ in self._signals.read()):
            self._asked = True
        _, status, killed, unkillable, out, err, out_head, err_head, merged, _ = self._last
        return Ended(
            wait_status=status,
            started_at=started_at,
            lived_s=self._lived_s,
            stdout_tail=out,
            stderr_tail=err,
            merged=merged,
            heads=(out_head, err_head),
            forwarded=tuple(self._forwarded),
            interrupted=self._asked,
            ended_by=self._ended_by,
            killed=killed,
            unkillable=tuple(unkillable),
            asked_s=self._asked_s(),
        )

    def _asked_s(self) -> float | None:
        if self._asked_at is None:
            return None
        end = self._clock() if self._ended_at is None else self._ended_at
        return max(0.0, end - self._asked_at)

    def _take_over(self, spared: Callable[[], Iterable[int]]) -> list[Any]:
        from saferun.keeper import process_tree

        killed, unkillable = process_tree.end_processes(process_tree.Family(spared).living)
        if not self._killing:
            self._ended_by = "keeper"
        if not self._exited:
            self._lived_s = self._clock() - self._began
        return ["ended", int(signal.SIGKILL), killed, unkillable, *(b"",) * 4, False, False]

    def _send(self, message: object) -> None:
        protocol.send(self._commands, message)

    def _hear(self, message: Any, on_start: Callable[[int, int], object] | None) -> None:
        if message[0] == "started":
            self._started, self._began = True, self._clock()
            self._later_at = self._began + self.later[0] if self.later else None
            if on_start is not None:
                on_start(self._keeper, message[1])
        elif message[0] == "exited":
            self._exited, self._lived_s, self._ended_at = True, message[1], self._clock()
            if self._must_end and not self._killing:
                limit = self._ended_at + _READER_GRACE_S
                self._deadline = limit if self._deadline is None else min(limit, self._deadline)
        else:
            self._last = list(message)

    def _signal(self, number: int, sender: str) -> None:
        if number in _TERMINAL_SIGNALS:
            self._send(("size",))
        elif number in _USER_SIGNALS:
            ranks = _rank_pids(self._receipts) if self._apart else None
            self._forward(number, ranks, sender)
        elif self._exited:
            self._kill("job")  # only output is left, and somebody does not want to wait for it
            self._asked = True
        elif self._apart:
            self._ask(number, sender)
        else:
            self._asked = True
            if sender and self._started:  # a key at the terminal reaches the job itself
                self._asked_at = self._clock()
            else:
                self._forward(number)
            if number != signal.SIGINT:  # which a debugger takes and goes on
                self._start_grace()

    def _ask(self, number: int, sender: str) -> None:
        """Ask the agent to end: once, since a second request would break its shutdown off."""
        if number == signal.SIGINT:
            at = self._clock()
            if self._interrupts and at - self._interrupts[0] > _SAME_KEYPRESS_S:
                self._kill("interrupt")
            self._interrupts.append(at)
        if not self._asked:
            self._asked = True
            self._forward(number, sender=sender)
            self._start_grace()

    def _forward(self, number: int, ranks: list[int] | None = None, sender: str = "") -> None:
        if sender != self._signals.STEP or not self._started:  # else the job has got it, too
            self._send(("signal", int(number), ranks))
        self._forwarded.append(signal.Signals(number).name)
        self._asked_at = self._clock()

    def _start_grace(self) -> None:
        self._must_end = True
        if self._grace_s is not None and self._deadline is None:
            self._deadline = self._clock() + self._grace_s

    def _kill(self, why: str) -> None:
        from saferun.keeper import process_tree

        if not self._killing:
            self._killing, self._ended_by = True, why
            self._send(("kill",))
            limit = process_tree.UNKILLABLE_S + protocol.HURRIED_DRAIN_S + _KEEPER_GRACE_S
            self._deadline = self._clock() + limit

    def _left_ms(self) -> float | None:
        times = [at for at in (self._deadline, self._later_at) if at is not None]
        return max(0, min(times) - self._clock()) * 1000 if times else None

    def _mind_the_time(self) -> None:
        if self._later_at is not None and self._clock() >= self._later_at:
            self._later_at = None
            if self.later and not self._exited:
                self.later[1]()
        if self._deadline is None or self._clock() < self._deadline:
            return
        if not self._killing:
            self._kill("job" if self._exited else "grace")
        else:  # the keeper is stopped or stuck: without it we are the next to inherit the job
            os.kill(self._keeper, signal.SIGKILL)
            self._deadline = None


def _cannot_start(message: list[Any]) -> Exception:
    from saferun.errors import UnavailableError

    _, _, text, program = message
    return UnavailableError(
        f"cannot start `{program}`: {text}", fix="check the program and its mode"
    )


def _rank_pids(receipts: str | None) -> list[int]:
    """Return the pids of the ranks that have left a receipt."""
    try:
        names = os.listdir(receipts) if receipts else []
    except OSError:
        return []
    words = [name.removesuffix(".jsonl").rpartition("-pid") for name in names]
    return [int(pid) for head, _, pid in words if pid.isdigit() and "rank" in head]


class _Modes:
    """The settings of our terminal, to be put back after a job that was killed while it read."""

    def __init__(self) -> None:
        self._fd = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)
        self._saved = termios.tcgetattr(self._fd) if self._fd is not None else None

    def restore(self) -> None:
        """Put the settings back, unless the terminal is somebody else's at the moment."""
        if self._fd is None or self._saved is None:
            return
        try:
            if os.tcgetpgrp(self._fd) != os.getpgrp():
                return
            if termios.tcgetattr(self._fd) != self._saved:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._saved)
        except (OSError, termios.error):  # not our terminal, or it is gone
            return
