"""`saferun runs watch`: a run that goes on, looked at until it is over or Ctrl-C.

The run is only read, never touched (supervise/live_run.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from saferun.cli import colour, watch_view
from saferun.cli.options import echo, json_text
from saferun.errors import UsageError
from saferun.journal import reader, time_spent
from saferun.journal.attempts import attempts
from saferun.supervise.live_run import LiveRun, Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

    from rich.live import Live

    from saferun.journal.reader import Run

_KEYS = "Ctrl-C ends the watching; the run goes on"
_HEARD = (signal.SIGWINCH, signal.SIGTSTP)  # while it waits


def chosen(base: str, word: str | None) -> tuple[Run, str]:
    """Return the run that is watched, and what is to be said of the choice.

    Args:
        base: the directory of runs.
        word: what the user gave: an ID, the beginning of one, `last`; None for the newest that is
            going on.

    Raises:
        UsageError: there is none.
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
        note: about the choice of it; "" for nothing.
        as_json: print an object for each change, a line each.
        interval_s: between two looks.
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
    for now in _looks(live, interval_s):
        if (new := watch_view.changes(now)) != shown:
            echo(text(now))
            sys.stdout.flush()
            shown = new


def _draw(live: LiveRun, interval_s: float, note: str) -> None:
    """Draw the run on the terminal's second screen, then show on the first one how it ended."""
    from rich.console import Console
    from rich.live import Live

    signal.signal(signal.SIGTERM, _end)  # or the second screen would stay
    drawn = Live(console=Console(), screen=True, auto_refresh=False)
    keys = f"{note}; {_KEYS}" if note else _KEYS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        with drawn:
            for now in _looks(live, interval_s, drawn):
                drawn.update(colour.drawn(watch_view.lines(now, keys)), refresh=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    from saferun.cli import runs_view

    plan, tried, at = reader.read_plan(now.run.path), attempts(now.run), time.time()
    times = time_spent.read(now.run, tried, at)
    colour.echo_page(runs_view.as_text(now.run, tried, plan, times, at))


def _looks(live: LiveRun, interval_s: float, drawn: Live | None = None) -> Iterator[Snapshot]:
    """Yield a look at the run now and then, and a last one when it is over."""
    while True:
        now = live.look()
        yield now
        if not watch_view.goes_on(now.run):
            return
        if drawn is None:
            time.sleep(interval_s)
            continue
        heard = signal.sigtimedwait(_HEARD, interval_s)
        if heard and heard.si_signo == signal.SIGTSTP:
            drawn.stop()
            os.kill(os.getpid(), signal.SIGSTOP)  # until `fg`
            drawn.start()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
