"""The life of one attempt on saferun's side: its states, the events and their effects.

This side passes signals on and limits the time in which the job must end. It acts on the job only
by commands to the keeper, and touches no process itself except a keeper that is stopped or stuck.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from saferun.keeper import protocol
from saferun.keeper.job import DEATH_SIGNALS
from saferun.keeper.process_tree import UNKILLABLE_S
from saferun.keeper.state_machine import StateMachine, Table, rows
from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer
from saferun.supervise.attempt.end_requests import USER_SIGNALS
from saferun.supervise.ready.keeper_pool import Standby
from saferun.system.signalfd import Signals

# States.
STARTING = "starting"  # the keeper has its task; the command is not executed yet
ASKED_EARLY = "asked early"  # the same, and a signal has asked the job to end
RUNNING = "running"  # the command runs
ENDING = "ending"  # the command still runs after a request to end that stays in force
DRAINING = "draining"  # the command has exited; its leftovers are ended and its output is copied
KILLING = "killing"  # the keeper has been told to kill
ENDED = "ended"  # the keeper has reported the end
FAILED = "failed"  # the keeper could not execute the command
LOST = "lost"  # the keeper died without a report of the end
LIVING = (STARTING, ASKED_EARLY, RUNNING, ENDING, DRAINING, KILLING)
OVER = (ENDED, FAILED, LOST)

# Events, in addition to the reports of protocol.py.
KEEPER_GONE = "keeper gone"  # its pipe was closed before the last report
TERMINAL = "terminal signal"
USER = "user signal"
INTERRUPT = "interrupt"  # SIGINT
INTERRUPT_AGAIN = "second interrupt"  # another SIGINT, and not a repetition of the first
TERMINATE = "terminate"  # SIGHUP, SIGTERM
DEADLINE = "deadline"
HUNG = "hung"  # the watch asks for the end
KEEPER_STOPPED = "keeper stopped"  # the keeper does not run (keeper_watch.py)

TERMINAL_SIGNALS = (signal.SIGWINCH, signal.SIGCONT)  # after `fg` the window may have changed
ALL_SIGNALS = (*DEATH_SIGNALS, *USER_SIGNALS, *TERMINAL_SIGNALS)
SAME_KEYPRESS_S = 0.1  # wrappers repeat a Ctrl-C that the terminal has already sent
READER_GRACE_S = 10.0  # wait for a reader of the remaining output of a job that ended on request
KEEPER_GRACE_S = 5.0  # a keeper's extra time beyond that for processes that do not die


class AttemptLife(StateMachine):
    """One attempt from its start to its end.

    Args:
        standby: the keeper that has the task.
        spec: the command and how it is run.
        observer: what is called during the attempt.
        clock: function that returns seconds.
    """

    def __init__(
        self, standby: Standby, spec: AttemptSpec, observer: Observer, clock: Callable[[], float]
    ) -> None:
        super().__init__(OWN_GROUP if spec.own_group else OUR_GROUP, STARTING)
        self._standby = standby
        self._spec = spec
        self._observer = observer
        self._clock = clock
        self._began = clock()
        self._deadline: float | None = None
        self._look_at: float | None = None
        self._first_interrupt_at: float | None = None
        self._asked_at: float | None = None  # time of the last signal for the job
        self._ended_at: float | None = None
        self.keeper_was_stopped = False  # the keeper was ended because it was stopped (SIGSTOP)
        self.keeper_failed = False  # the keeper ended with an error of its own
        self.launcher = 0  # the launcher's pid
        self.exact = True  # no output is lost if the keeper is killed
        self.status: int | None = None  # the launcher's status, once the keeper has reported it
        self.report: protocol.Ended | protocol.Failed | None = None  # the keeper's last report
        self.lived_s = 0.0
        self.forwarded: list[str] = []
        self.interrupted = False  # a signal asked us to end
        self.ended_by = "job"

    # --- events ----------------------------------------------------------------------------

    def take_signal(self, number: int, sender: str) -> None:
        """Handle a signal that saferun received; see `Signals.read`.

        Args:
            number: the signal.
            sender: the sender: KERNEL, STEP or "".
        """
        if number in TERMINAL_SIGNALS:
            self.step(TERMINAL)
        elif number in USER_SIGNALS:
            self.step(USER, number, sender)
        elif number == signal.SIGQUIT:
            self._take_question(sender)
        elif number == signal.SIGINT:
            self.step(self._interrupt(), number, sender)
        else:
            self.step(TERMINATE, number, sender)

    def _take_question(self, sender: str) -> None:
        """Handle a SIGQUIT, which does not end the run: it asks where the ranks are.

        A command in our process group gets the signal itself, as those from the terminal's keys.
        """
        if self.state not in LIVING:
            return
        if not self._spec.own_group:
            if not sender or self.state in (STARTING, ASKED_EARLY):
                self._send(protocol.Signal(int(signal.SIGQUIT), None))
        elif self.state == RUNNING:
            self._observer.asked()
            self._look_at = self._clock()

    @property
    def saw_interrupt(self) -> bool:
        """Return whether a SIGINT has come."""
        return self._first_interrupt_at is not None

    def _interrupt(self) -> str:
        now = self._clock()
        if self._first_interrupt_at is None:
            self._first_interrupt_at = now
        return INTERRUPT_AGAIN if now - self._first_interrupt_at > SAME_KEYPRESS_S else INTERRUPT

    def take_time(self) -> None:
        """Handle the deadlines that have passed."""
        if self._look_at is not None and self._clock() >= self._look_at:
            self._look()
        if self._deadline is not None and self._clock() >= self._deadline:
            self._deadline = None
            self.step(DEADLINE)

    def _look(self) -> None:
        self._look_at = self._clock() + self._observer.look()
        if self._observer.cause and self.state == RUNNING:
            self._look_at = None
            self.step(HUNG)

    def left_ms(self) -> float | None:
        """Return the milliseconds until the next deadline; None if there is none."""
        times = [t for t in (self._deadline, self._look_at) if t is not None]
        return max(0, min(times) - self._clock()) * 1000 if times else None

    def asked_s(self) -> float | None:
        """Return the time from the last signal for the job to its end; None without a signal."""
        if self._asked_at is None:
            return None
        end = self._clock() if self._ended_at is None else self._ended_at
        return max(0.0, end - self._asked_at)

    def age_s(self) -> float:
        """Return the time since the command was started, which may be after the attempt's start."""
        return self._clock() - self._began

    # --- actions ---------------------------------------------------------------------------

    def _begin(self, report: protocol.Started) -> None:
        self._began = self._clock()
        self.launcher, self.exact = report.launcher, report.exact
        self._observer.started(self._standby.pid, report.launcher)
        if report.cold:
            self._observer.cold(report.cold)
        self._look_at = self._began

    def _exit(self, report: protocol.Exited) -> None:
        self.lived_s, self._ended_at, self._look_at = report.lived_s, self._clock(), None
        self.status = report.wait_status

    def _exit_as_asked(self, report: protocol.Exited) -> None:
        self._exit(report)
        limit = self._clock() + READER_GRACE_S
        self._deadline = limit if self._deadline is None else min(limit, self._deadline)

    def _finish(self, report: protocol.Ended | protocol.Failed) -> None:
        self.report = report

    def _lose(self) -> None:
        self.ended_by = "keeper"
        self._lose_killing()

    def _lose_killing(self) -> None:
        if self._ended_at is None:
            self.lived_s = self._clock() - self._began

    def _resize(self) -> None:
        self._send(protocol.Resize())

    def _pass_user_signal(self, number: int, sender: str) -> None:
        handled = signal.Signals(number).name in self._spec.handled
        self._forward(number, None if handled else _rank_pids(self._spec.receipts), sender)

    def _ask(self, number: int, sender: str) -> None:
        self.interrupted = True
        self._forward(number, None, sender)
        self._limit()
        if number == signal.SIGINT:
            self._observer.interrupted(self._spec.grace_s)

    def _pass_on(self, number: int, sender: str) -> None:
        self.interrupted = True
        if sender and self.state not in (STARTING, ASKED_EARLY):
            self._asked_at = self._clock()  # a key at the terminal reaches the job directly
        else:
            self._forward(number, None, "")

    def _pass_on_and_limit(self, number: int, sender: str) -> None:
        self._pass_on(number, sender)
        self._limit()

    def _note(self, number: int, sender: str) -> None:
        self.interrupted = True

    def _limit(self) -> None:
        if self._spec.grace_s is not None:
            self._deadline = self._clock() + self._spec.grace_s

    def _kill_unread(self, number: int = 0, sender: str = "") -> None:
        """Stop waiting for a reader: the job has ended, and only its output is left."""
        self._kill("job")
        self.interrupted = True

    def _kill(self, ended_by: str) -> None:
        self.ended_by = ended_by
        self._send(protocol.Kill())
        self._deadline = self._clock() + UNKILLABLE_S + protocol.HURRIED_DRAIN_S + KEEPER_GRACE_S

    def _kill_keeper(self) -> None:
        # It is stopped or stuck. When it is dead, we inherit the job's processes.
        os.kill(self._standby.pid, signal.SIGKILL)

    def _kill_stopped_keeper(self) -> None:
        self.keeper_was_stopped = True
        self._kill_keeper()

    def _forward(self, number: int, ranks: list[int] | None, sender: str) -> None:
        # Once the job runs, it also gets the signals that Slurm sends to all processes of our step.
        if sender != Signals.STEP or self.state in (STARTING, ASKED_EARLY):
            self._send(protocol.Signal(int(number), ranks))
        self.forwarded.append(signal.Signals(number).name)
        self._asked_at = self._clock()

    def _send(self, command: protocol.Command) -> None:
        protocol.send(self._standby.commands, command)


def _rank_pids(receipts: str | None) -> list[int]:
    """Return the pids of the ranks that left a receipt."""
    try:
        names = os.listdir(receipts) if receipts else []
    except OSError:
        return []
    parts = [name.removesuffix(".jsonl").rpartition("-pid") for name in names]
    return [int(pid) for head, _, pid in parts if pid.isdigit() and "rank" in head]


def _killed(by: str) -> Callable[..., None]:
    """Return an action that has the job killed, and notes the reason."""
    return lambda life, *details: life._kill(by)


_ASKS = (INTERRUPT, INTERRUPT_AGAIN, TERMINATE)
# (state, event) -> (action, next state). These rows hold whatever the command's process group is.
_COMMON: Table = {
    (STARTING, protocol.Started): (AttemptLife._begin, RUNNING),
    (ASKED_EARLY, protocol.Started): (AttemptLife._begin, ENDING),
    (KILLING, protocol.Started): (AttemptLife._begin, KILLING),
    **rows((STARTING, ASKED_EARLY, KILLING), [protocol.Failed], AttemptLife._finish, FAILED),
    (RUNNING, protocol.Exited): (AttemptLife._exit, DRAINING),
    (ENDING, protocol.Exited): (AttemptLife._exit_as_asked, DRAINING),
    (KILLING, protocol.Exited): (AttemptLife._exit, KILLING),
    **rows((DRAINING, KILLING), [protocol.Ended], AttemptLife._finish, ENDED),
    #
    (RUNNING, HUNG): (_killed("hang"), KILLING),
    **rows((ASKED_EARLY, ENDING), [DEADLINE], _killed("grace"), KILLING),
    **rows([DRAINING], (*_ASKS, DEADLINE), AttemptLife._kill_unread, KILLING),
    **rows([KILLING], [DEADLINE], AttemptLife._kill_keeper),
    **rows([KILLING], _ASKS, None),
    #
    **rows(LIVING, [KEEPER_GONE], AttemptLife._lose, LOST),
    (KILLING, KEEPER_GONE): (AttemptLife._lose_killing, LOST),
    **rows(LIVING, [KEEPER_STOPPED], AttemptLife._kill_stopped_keeper),
    **rows(LIVING, [TERMINAL], AttemptLife._resize),
    **rows(LIVING, [USER], AttemptLife._pass_user_signal),
    # Signals of the last moment: the job gets none of them, but they ask the run to end.
    **rows(OVER, (TERMINAL, USER), None),
    **rows(OVER, _ASKS, AttemptLife._note),
}
# The command has its own process group. A request to end is passed on once, since a second one
# would interrupt torchrun's shutdown; a second Ctrl-C kills.
OWN_GROUP: Table = {
    **_COMMON,
    **rows([STARTING], (INTERRUPT, TERMINATE), AttemptLife._ask, ASKED_EARLY),
    **rows([RUNNING], (INTERRUPT, TERMINATE), AttemptLife._ask, ENDING),
    **rows((ASKED_EARLY, ENDING), (INTERRUPT, TERMINATE), None),
    **rows((ASKED_EARLY, ENDING), [INTERRUPT_AGAIN], _killed("interrupt"), KILLING),
}
# The command is in our process group. It gets signals from the terminal's keys directly; all other
# signals are passed on each time. SIGINT sets no time limit: a debugger handles it and continues.
OUR_GROUP: Table = {
    **_COMMON,
    **rows((STARTING, ASKED_EARLY, RUNNING, ENDING), _ASKS, AttemptLife._pass_on),
    (STARTING, TERMINATE): (AttemptLife._pass_on_and_limit, ASKED_EARLY),
    (RUNNING, TERMINATE): (AttemptLife._pass_on_and_limit, ENDING),
}
