"""The user's command that is told of a run's events (`notify`).

It runs beside the job, in its own session under a small process (keeper/bounded_main.py). That
process ends the command, with all that it started, after LIMIT_S or when saferun dies. Only the end
of the run waits for the command. Its output is discarded; a failure is reported in one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.base.durations import seconds
from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.places import Place
from saferun.journal.event_types import LossLost
from saferun.model import LaunchPlan
from saferun.supervise.ready import keeper_pool
from saferun.system import paths
from saferun.system.command import Child
from saferun.system.printable import printable

LIMIT_S = 10.0  # time for the command
_END_S = 5.0  # extra time in which its process ends it
_LOOK_S = 0.02  # between two checks at the end of the run whether a command has ended
_MOST_CHARS = 2000  # longest text in an event

_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from saferun.keeper import bounded_main; "
    "bounded_main.bounded(float(sys.argv[2]), *sys.argv[3:])"
)


class _Running(NamedTuple):
    """A started command."""

    event: str
    child: Child  # bounds the command; its output is the reason of a failure
    lifeline: int  # descriptor that ends the command when it closes
    until_s: float  # on the monotonic clock


class Notifier:
    """Tell a command about the events of a run.

    Args:
        plan: the plan, which has the command and its events.
        environ: the command's whole environment.
        about: facts in every event: the run, the host, …
        masked: function that returns a text without secrets.
        say: function that takes lines for people.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        about: Mapping[str, object],
        masked: Callable[[str], str],
        say: Callable[[str], None],
    ) -> None:
        self._command, self._on = plan.settings.notify.command, plan.settings.notify.on
        self._environ, self._masked, self._say = dict(environ), masked, say
        self._about = {**about, "script": plan.script}
        self._name = os.path.basename(plan.script or "") or "the run"
        self._last: dict[str, object] = {}  # facts of the last failure
        self._attempt = 0
        self._hurried = False  # nobody waits for a command any more
        self._running: list[_Running] = []
        self.is_speaker: Callable[[], bool] = lambda: True  # one node notifies for all

    # --- events ------------------------------------------------------------------------------

    def attempt_ended(self, last: AttemptOutcome) -> None:
        """Note the end of an attempt; report it if a mitigation starts the next one."""
        self._attempt = last.number
        diagnosis, decision = last.diagnosis, last.decision
        added = (decision.add,) if decision.add else ()
        self._last = {
            "attempt": last.number,
            "status": last.exit_code,
            "kind": last.kind,
            "verdict": last.diagnosis.verdict,
            "root_rank": last.root_rank,
            "root_line": diagnosis.root_line or None,
            "user_frame": diagnosis.user_frame,
            "mitigations": [*last.mitigations, *added],
        }
        if added and decision.action == "again":
            failed = f"attempt {last.number} failed ({last.kind})"
            what = f"{failed}; the next one starts {decision.reason}"
            self._tell("mitigated", what, self._last)

    def hang(self, attempt: int, silent_s: float, places: Sequence[Place]) -> None:
        """Report a job that is silent for too long.

        Args:
            attempt: number of the running attempt.
            silent_s: length of the silence in seconds.
            places: where each rank is.
        """
        odd = next((place for place in places if place.odd), None)
        where = f"; rank {odd.rank} {odd.what} {odd.frame}".rstrip() if odd else ""
        what = f"no sign of work for {seconds(silent_s)}, it may hang{where}"
        self._tell("hang", what, {"attempt": attempt, "silent_s": silent_s})

    def loss(self, attempt: int, found: LossLost) -> None:
        """Report a training whose loss is not a number any more.

        Args:
            attempt: number of the running attempt.
            found: the journal's event about it.
        """
        facts = {"attempt": attempt, "step": found.step, "checkpoint": found.checkpoint}
        self._tell("loss", found.line, facts)

    def run_ended(self, status: int | None, reason: str, *, asked: bool) -> None:
        """Report the end of the run, unless a person asked for it.

        Args:
            status: exit status of the run; None after a fault of saferun itself.
            reason: why the run ended, for people.
        """
        if status == 0:
            attempts = f"{self._attempt} attempts" if self._attempt > 1 else "one attempt"
            self._tell("finished", f"finished, after {attempts}", {**self._last, "status": 0})
        elif asked:
            self._hurried = True
        else:
            line = f": {self._last.get('root_line')}" if self._last.get("root_line") else ""
            line += f", at {self._last.get('user_frame')}" if self._last.get("user_frame") else ""
            what = f"failed, {self._last.get('kind') or f'status {status}'}{line}"
            facts = {**self._last, "status": status, "reason": reason}
            self._tell("failed", what, facts)

    def _tell(self, event: str, what: str, facts: Mapping[str, object]) -> None:
        """Start the command with an event; never raises and never waits."""
        if (self._on and event not in self._on) or not self.is_speaker():
            return
        text = f"saferun: {self._name} on {self._about['host']}: {what}"
        head = {"schema": 1, "event": event, "at": round(time.time(), 3), "text": text}
        try:
            self._sweep()
            told = cleaned({**head, **self._about, **facts}, self._masked, _MOST_CHARS)
            self._running.append(self._start(event, json.dumps(told).encode() + b"\n"))
        except (OSError, ValueError) as error:
            self._complain(event, f"cannot be run: {getattr(error, 'strerror', None) or error}")

    # --- the command's processes -------------------------------------------------------------

    def pids(self) -> list[int]:
        """Return the pids of running commands, which are not part of an attempt."""
        return [one.child.pid for one in self._running if one.child.pid]

    def close(self, wake: int) -> None:
        """Wait for the running commands, each within its limit.

        Args:
            wake: a descriptor that is readable when a signal asks for the end, which then ends
                them; -1 for none.
        """
        poller = select.poll()  # select(2) takes no descriptor above 1023
        if wake >= 0:
            poller.register(wake, select.POLLIN)
        for one in self._running:
            until_s = 0.0 if self._hurried else one.until_s
            while not one.child.has_ended() and time.monotonic() < until_s:
                if poller.poll(_LOOK_S * 1e3):
                    break
            self._finish(one)
        self._running.clear()

    def _sweep(self) -> None:
        """Finish the commands that have ended."""
        for one in list(self._running):
            if one.child.has_ended():
                self._running.remove(one)
                self._finish(one)

    def _start(self, event: str, line: bytes) -> _Running:
        argv = [sys.executable, "-I", "-S", "-c", keeper_pool.prologue() + _BOOT]
        argv += [os.path.dirname(paths.PACKAGE), str(LIMIT_S), *self._command]
        reading, lifeline = os.pipe()
        child = Child(argv, self._environ, stdin=reading)
        os.close(reading)
        with contextlib.suppress(BrokenPipeError):  # it has died, and its answer says so
            os.write(lifeline, line)
        return _Running(event, child, lifeline, time.monotonic() + LIMIT_S + _END_S)

    def _finish(self, one: _Running) -> None:
        """End a command that still runs, and report why it failed."""
        os.close(one.lifeline)
        one.child.wait(_END_S)
        answer = one.child.take()
        if text := answer.out or answer.trouble:
            self._complain(one.event, text)

    def _complain(self, event: str, why: str) -> None:
        text = f"notify: `{self._command[0]}` {why} (event {event})"
        self._say(printable(self._masked(text)))


def cleaned(value: Any, masked: Callable[[str], str], most: int) -> Any:
    """Return a value for JSON without secrets, and with texts cut to a length.

    Args:
        value: a text, or a dictionary or list of such values.
        masked: function that returns a text without secrets.
        most: longest text in characters.
    """
    if isinstance(value, str):
        return masked(value)[:most]
    if isinstance(value, dict):
        return {key: cleaned(item, masked, most) for key, item in value.items()}
    return [cleaned(item, masked, most) for item in value] if isinstance(value, list) else value
