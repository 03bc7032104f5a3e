"""Signals that ask a run to end, collected while no attempt handles them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from saferun.base.durations import seconds
from saferun.system.signalfd import Signals

END_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # no other signal ends a run
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class EndRequestedError(BaseException):
    """A signal asks the run to end. No handler of `Exception` may catch it.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class EndRequests:
    """A context in which these signals stay pending until `raised`, an attempt or the end.

    An attempt reads the signals that come while it runs (attempt_runner.py), even if they are
    blocked here. A signal that is still pending at the end is discarded, since the run's status is
    recorded.

    SIGURG says that the time limit is near: a script of `gen-shell --slurm` sends it to every
    process of a step. It means nothing to the ranks, so they get SIGUSR2, and no other attempt
    begins.
    """

    def __init__(self) -> None:
        self._signals = Signals(END_SIGNALS)
        self._is_last = False

    def __enter__(self) -> EndRequests:
        self._signals.__enter__()
        self._before = signal.signal(signal.SIGURG, self._end_soon)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGURG, self._before)
        self._signals.read()
        self._signals.__exit__(*error)

    @property
    def blocked(self) -> frozenset[int]:
        """Return the signals that are blocked only because of this context."""
        return self._signals.wanted - self._signals.blocked_before

    @property
    def fd(self) -> int:
        """Return a descriptor that is readable while a signal is pending."""
        return self._signals.fd

    def _end_soon(self, number: int, frame: FrameType | None) -> None:
        self._is_last = True
        os.kill(os.getpid(), signal.SIGUSR2)  # an attempt passes it on

    def check_last(self) -> None:
        """Raise EndRequestedError if the time limit is near."""
        if self._is_last:
            raise EndRequestedError(signal.SIGTERM)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise EndRequestedError for a pending or new signal, during interruptible work.

        Programs that are started in this context do not inherit the blocked signals.
        """
        before = {number: signal.signal(number, _raise) for number in self.blocked}
        try:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, self.blocked)
                yield
            finally:
                # This also handles a signal that has already come, so it may raise.
                signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise EndRequestedError(number)


def answer(left_s: float | None) -> str:
    """Return the line after a Ctrl-C that asks the job to end; the terminal has echoed the key.

    Args:
        left_s: seconds until the job is killed; None for no limit.
    """
    limit = "" if left_s is None else f" (up to {seconds(left_s)})"
    return "\n" * os.isatty(2) + f"asked the job to end{limit}; Ctrl-C again kills it"


def outlive_signals() -> None:
    """Ignore, while no attempt runs, signals that are for ranks or that ask where the ranks are."""
    for number in (*USER_SIGNALS, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, frame: None)


def restore_child_ends() -> None:
    """Undo our caller's ignoring of SIGCHLD: torchrun would take each rank's end for a success."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def restore_interrupts() -> None:
    """Handle Ctrl-C and Ctrl-\\ if a shell started us with them ignored, as for `&`.

    torchrun handles them in that case, too (elastic/multiprocessing/api.py). A job that ignored
    them would survive the Ctrl-C that ends its script.
    """
    for number, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)
