"""`saferun runs watch`: show a run until it is over or the user presses Ctrl-C.

The run is only read, never touched (supervise/watch/live_run.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from saferun.cli import colour
from saferun.cli.options import echo, json_text
from saferun.cli.runs import runs_view, watch_view
from saferun.diagnosis import signatures
from saferun.errors import UsageError
from saferun.journal import reader, time_spent
from saferun.journal.attempts import attempts
from saferun.journal.reader import Run
from saferun.supervise.watch.live_run import LiveRun, Snapshot
from saferun.system.signalfd import Signals

_KEYS = "q or Ctrl-C ends the watching; the run goes on"
_HEARD = (signal.SIGWINCH, signal.SIGTSTP)  # signals handled while waiting


def chosen(base: str, word: str | None) -> tuple[Run, str]:
    """Return the run to watch, and a note about the choice.

    Args:
        base: the directory of runs.
        word: the user's choice: an ID, the beginning of one, `last`; None for the newest that has
            not ended.

    Raises:
        UsageError: there is no such run.
    """
    now = time.time()
    if word is not None:
        return reader.named(base, word, now), ""
    found, closed = reader.find(base, now)
    live = [run for run in found if run.outcome == reader.RUNNING]
    if not live:
        hidden = f" ({closed} directories there may not be read)" if closed else ""
        fix = "`saferun runs list` has those that are over; with retry.attempts: 1 there is none"
        raise UsageError(f"no run is going on{hidden}", where=base, fix=fix)
    others = ", ".join(run.id for run in live[1:4])
    return live[0], f"{len(live)} runs are going on; the others: {others}" if live[1:] else ""


def watch(run: Run, note: str, *, as_json: bool, interval_s: float) -> None:
    """Show a run until it is over.

    Args:
        run: the run.
        note: note about the choice of the run; "" for none.
        as_json: print one object a line, for each change.
        interval_s: seconds between two reads of the run.
    """
    live = LiveRun(run, os.environ)
    if as_json:
        _follow(live, interval_s, lambda now: json_text(watch_view.as_json(now), None))
    elif colour.has_terminal() and sys.stderr is not None:
        _draw(live, interval_s, note)
    else:
        if note:
            echo(f"saferun: {note}", err=True)
        _follow(live, interval_s, watch_view.one_line)


def _follow(live: LiveRun, interval_s: float, text: Callable[[Snapshot], str]) -> None:
    """Print a line for each change, until the run is over."""
    shown: object = None
    while True:
        now = live.snapshot()
        if (new := watch_view.changes(now)) != shown:
            echo(text(now))
            sys.stdout.flush()
            shown = new
        if not watch_view.goes_on(now.run):
            return
        time.sleep(interval_s)


def _draw(live: LiveRun, interval_s: float, note: str) -> None:
    """Draw the run on the terminal's alternate screen, then show on the main one how it ended."""
    from rich.console import Console  # only on a terminal, as in colour.py
    from rich.live import Live

    signal.signal(signal.SIGTERM, _end)  # otherwise the alternate screen stays
    drawn = Live(console=Console(), screen=True, auto_refresh=False)
    text = f"{note}; {_KEYS}" if note else _KEYS
    with Signals(_HEARD) as signals, _Keys() as keys, drawn:
        while watch_view.goes_on((now := live.snapshot()).run):
            drawn.update(colour.drawn(watch_view.lines(now, text)), refresh=True)
            if keys.has_quit(signals.fd, interval_s):
                return
            if any(number == signal.SIGTSTP for number, _ in signals.read()):
                drawn.stop()
                keys.leave()
                os.kill(os.getpid(), signal.SIGSTOP)  # until `fg`
                keys.take()
                drawn.start()

    plan, tried, at = reader.read_plan(now.run.path), attempts(now.run), time.time()
    times = time_spent.read(now.run, tried, at)
    kinds = signatures.load().kinds
    colour.echo_page(runs_view.as_text(now.run, tried, plan, times, at, kinds))


class _Keys:
    """The keyboard, read key by key if stdin is a terminal and we are in the foreground."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] | None = None  # the terminal's earlier modes

    def __enter__(self) -> _Keys:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def take(self) -> None:
        """Make keys arrive at once and without echo, unless this process is in the background."""
        if self._is_ours():
            with contextlib.suppress(termios.error):
                self._before = termios.tcgetattr(self._fd)
                tty.setcbreak(self._fd, termios.TCSADRAIN)

    def leave(self) -> None:
        """Restore the terminal's modes."""
        if self._before is not None and self._is_ours():
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        self._before = None

    def has_quit(self, signals: int, limit_s: float) -> bool:
        """Wait for a key or a signal; return whether the key is `q`.

        Args:
            signals: descriptor that is readable when a signal has come.
            limit_s: the longest wait in seconds.
        """
        wanted = [signals, *([self._fd] if self._before is not None and self._is_ours() else [])]
        ready = select.select(wanted, [], [], limit_s)[0]
        if self._fd not in ready:
            return False
        try:
            keys = os.read(self._fd, 64)
        except OSError:
            keys = b""
        if not keys:
            self._fd = -1  # the terminal is gone
        return b"q" in keys.lower()

    def _is_ours(self) -> bool:
        try:
            return self._fd >= 0 and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
