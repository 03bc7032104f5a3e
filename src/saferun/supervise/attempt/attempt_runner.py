"""Run one attempt of a job under a keeper (keeper/keeper.py), until nothing of it is left.

This side passes signals on, limits the time that a job may take to end, and restores the terminal's
settings. If the keeper is killed, this side takes its place (keeper_loss.py). attempt_life.py has
the states. The keeper's side owns the processes and copies the output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time

from saferun.base import prctl
from saferun.errors import EXIT_UNAVAILABLE, OWN_FAULT, FaultError, UnavailableError
from saferun.inject import contract
from saferun.keeper import protocol
from saferun.supervise.attempt import keeper_loss
from saferun.supervise.attempt.attempt_life import (
    ALL_SIGNALS,
    KEEPER_GONE,
    KEEPER_STOPPED,
    OVER,
    AttemptLife,
)
from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer
from saferun.supervise.attempt.keeper_watch import KeeperWatch
from saferun.supervise.attempt.terminal_modes import TerminalModes
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.ready import keeper_pool, warm_start
from saferun.supervise.ready.keeper_pool import Standby
from saferun.system.signalfd import Signals

# Messages if the system allows no further process or thread; such a failure is diagnosed.
_REFUSED = (os.strerror(errno.EAGAIN), "can't start new thread")


def run_attempt(
    spec: AttemptSpec,
    observer: Observer = Observer(),  # noqa: B008 - it has no state
    standby: Standby | None = None,
) -> AttemptEnd:
    """Start a command under supervision and wait until nothing of it is left.

    Call this function in the main thread, before other threads start (see signalfd.Signals). On
    return, signals act as they did before.

    Args:
        spec: the command and how it is run.
        observer: what is called during the attempt.
        standby: the result of an earlier `start_keeper` or `prepare`, which saves time; a dead
            keeper is replaced.

    Returns:
        How the attempt ended.

    Raises:
        UnavailableError: the command could not be started.
    """
    modes = TerminalModes()
    with Signals(ALL_SIGNALS) as signals:
        if standby is None:
            standby = keeper_pool.start_keeper()
        else:
            standby = keeper_pool.fit(standby, own_group=spec.own_group)
        life = AttemptLife(standby, spec, observer, time.monotonic)
        try:
            _follow(life, standby, _start(spec, standby, signals), observer, signals)
            report = _last_report(life, standby, observer, signals)
        finally:
            standby.close()
            modes.restore()
        for number, sender in signals.read():
            life.take_signal(number, sender)
        return _ended(life, report, time.time() - life.age_s())


def _start(spec: AttemptSpec, standby: Standby, signals: Signals) -> protocol.Start:
    """Return the keeper's command that starts the attempt."""
    changed = [int(signal.Signals[name]) for name in spec.limits.ignore]
    blocked = [int(number) for number in signals.blocked_before - spec.unblocked]
    warm, cold = standby.warm, ""
    limits = {n: most for n in ("nofile", "nproc") if (most := getattr(spec.limits, n))}
    if changed or blocked or limits or (warm and warm.own_group != spec.own_group):
        cold = "its limits or signals are others"  # it was started already, and cannot change them
    elif warm:
        cold = warm_start.difference(warm, spec.argv, spec.env)
    return protocol.Start(
        argv=list(spec.argv),
        env=dict(spec.env),
        own_group=spec.own_group,
        cold=cold,
        mark="" if spec.own_group else contract.START,
        ignored=[*keeper_pool.ignored_signals(), *changed],
        blocked=blocked,
        limits=limits,
        tail_bytes=spec.tail_bytes,
        gpu_prefix=spec.gpu_prefix,
    )


def _follow(
    life: AttemptLife, standby: Standby, start: protocol.Start, observer: Observer, signals: Signals
) -> None:
    """Handle messages and signals until the keeper reports the end of the attempt or dies."""
    prctl.become_subreaper()
    inbox = protocol.Inbox(standby.reports)
    protocol.send(standby.commands, start)
    observer.ordered()
    poller = select.poll()
    poller.register(signals.fd, select.POLLIN)
    poller.register(inbox.fd, select.POLLIN)
    watch = KeeperWatch(standby.pid, time.monotonic)
    while life.state not in OVER:
        ready = [fd for fd, _ in poller.poll(watch.left_ms(life.left_ms()))]
        if inbox.fd in ready:
            for report in inbox.read():
                if isinstance(report, protocol.Released):
                    standby.release(report.outer)
                else:
                    life.step(type(report), report)
            if inbox.closed and life.state not in OVER:
                life.step(KEEPER_GONE)
        if signals.fd in ready:
            for number, sender in signals.read():
                life.take_signal(number, sender)
        if life.state not in OVER:
            life.take_time()
            if watch.stopped_too_long():
                life.step(KEEPER_STOPPED)


def _last_report(
    life: AttemptLife, standby: Standby, observer: Observer, signals: Signals
) -> protocol.Ended:
    """Wait for the keeper's own end, or do its work if it was killed.

    Raises:
        UnavailableError: the command could not be started.
        FaultError: the keeper failed before that.
    """
    report = life.report
    lingers = isinstance(report, protocol.Ended) and report.lingers
    if not lingers:  # otherwise it stays, for processes that the job left behind on purpose
        with contextlib.suppress(ChildProcessError):  # if SIGCHLD is ignored
            status = os.waitpid(standby.pid, 0)[1]
            life.keeper_failed = os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
    if report is None:
        ended = keeper_loss.take_over(life, standby, observer, signals)
        if life.keeper_failed and not life.launcher:
            raise FaultError(
                f"saferun's keeper failed before the job's start, {OWN_FAULT}",
                where="its traceback stands above",
                fix="please report it; SAFERUN_DISABLE=1 runs torchrun without saferun",
            )
        return ended
    if isinstance(report, protocol.Failed):
        if report.reason in _REFUSED:
            line = f"cannot start `{report.program}`: {report.reason}\n".encode()
            status = EXIT_UNAVAILABLE << 8
            return protocol.Ended(status, 0, [], (b"", line))
        raise UnavailableError(
            f"cannot start `{report.program}`: {report.reason}",
            fix="check the program and its mode",
        )
    return report


def _ended(life: AttemptLife, report: protocol.Ended, started_at: float) -> AttemptEnd:
    return AttemptEnd(
        report=report,
        started_at=started_at,
        lived_s=life.lived_s,
        forwarded=tuple(life.forwarded),
        interrupted=life.interrupted,
        ended_by=life.ended_by,
        asked_s=life.asked_s(),
        keeper=_keepers_fate(life),
        by_interrupt=life.interrupted and life.saw_interrupt,
    )


def _keepers_fate(life: AttemptLife) -> str:
    """Return what happened to the keeper, for people; "" if it did not fail."""
    if life.ended_by != "keeper":
        return ""
    what = "has failed" if life.keeper_failed else "was killed"
    what = "was stopped and had to be killed" if life.keeper_was_stopped else what
    lost = "" if life.exact else "; the last output may be missing"
    return f"saferun's keeper {what}{lost}"
