"""The process between saferun and one attempt's job; it leaves nothing of the job behind.

    saferun -> keeper -> torchrun -> ranks -> DataLoader workers, compile workers, …

The keeper leads its own session and is a *subreaper*: any process of the job that loses its parent
becomes the keeper's child, even if it has changed its session or its group. When the job fails, or
when the pipe from saferun closes because saferun died, the keeper freezes all descendants (a frozen
process makes no new ones), kills them, and reports. If the keeper itself is killed, saferun is the
next subreaper and does the same (supervise/attempt/keeper_loss.py).

It also copies the job's output (output_relay.py), since that must continue while Ctrl-Z has stopped
saferun: torchrun's ranks then continue, too.

keeper_main.py starts it. This module uses only the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence

from saferun.keeper import process_tree, protocol, user_signals
from saferun.keeper.job import DEATH_SIGNALS, release_inherited, start_program
from saferun.keeper.output_relay import Streams
from saferun.keeper.state_machine import StateMachine, Table, rows

TYPE_CHECKING = False
if TYPE_CHECKING:  # needed only before an attempt
    from saferun.keeper.warm_agent import WarmAgent

# States.
WAITING = "waiting"  # no `Start` has come
STARTING = "starting"  # the command is being executed, or a warm agent is becoming it
SIGNALLED = "signalled"  # the same, and a signal has been sent to the process
RUNNING = "running"  # the command runs
EXITED = "exited"  # the command has exited; its leftovers are ended and the output is copied
HURRIED = "hurried"  # saferun died, or wants the job killed: everything is ended without waiting
LINGERING = "lingering"  # reported; a process that the job detached may still write
GONE = "gone"  # there is no job
UNREPORTED = (STARTING, SIGNALLED, RUNNING, EXITED, HURRIED)
WITH_JOB = (*UNREPORTED, LINGERING)

# Events, in addition to the commands of protocol.py.
SIGNAL_RANKS = "signal for ranks"  # a `Signal` for the ranks
CLOSED = "closed"  # saferun died, or has read all reports that it waits for
BORN = "born"  # the command runs
FAILED = "failed"  # the command could not be executed
EXIT = "exit"  # the command has exited
LINGER = "linger"  # only detached processes' output is left to copy

_RELAY_S = 0.05  # between two checks of the agent's output: a person notices no delay
_DEATH_S = 5.0  # from the closing of a warm process's last descriptor to its end
_ENDED, _LATE = "the process that imported ahead has ended", "it still imports ahead"
_HANDOVER_S = 300.0  # a warm agent may import from a cold disk; then a new process is started


class Keeper(StateMachine):
    """Run one job and end what is left of it.

    Args:
        streams: the streams that copy its output.
        inbox: the inbox for saferun's commands.
        reports: descriptor to which reports are written.
        held: descriptors that no other process may get while the job lives.
        wake: descriptor that is readable when a child has died or a channel has made progress.
    """

    def __init__(
        self, streams: Streams, inbox: protocol.Inbox, reports: int, held: Sequence[int], wake: int
    ) -> None:
        super().__init__(TABLE, WAITING)
        self._streams = streams
        self._inbox = inbox
        self._reports = reports
        self._held = held
        self._wake = wake
        self._family = process_tree.Family()
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._agent: WarmAgent | None = None
        self._cold = ""  # why the warm agent did not become the command
        self._own_group = True
        self._gpu_prefix = ""
        self._released: set[int] = set()  # outputs whose channel has ended

    def serve(self) -> None:
        """Handle commands until the job has ended and its output has been copied."""
        while self.state == WAITING:
            self._obey(self._inbox.first())
        if self.state == GONE:
            return
        began = time.monotonic()
        while self.state == RUNNING:
            if self._family.status is None:
                self._turn()
            else:
                self.step(EXIT)
        self._report(protocol.Exited(time.monotonic() - began, self._family.status))
        killed, unkillable = self._end_the_rest()
        # This is checked before the drain: a process that writes and ends during it must be waited
        # for.
        writers = self._family.reap() and bool(self._family.living())
        self._drain()
        self._report_end(killed, unkillable, writers)
        while self.state == LINGERING and not self._streams.done():
            self._turn()

    # --- events ----------------------------------------------------------------------------

    def _turn(self, limit_s: float | None = None) -> None:
        """Wait for an event and handle it."""
        waiting = self._inbox.waiting()  # commands that came together with `Start`
        for message in waiting:
            self._obey(message)
        limit_s = 0 if waiting else limit_s
        for fd, _ in self._poller.poll(None if limit_s is None else limit_s * 1000):
            self._handlers[fd]()
        self._family.reap()

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._poller.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None):
            self._poller.unregister(fd)

    def _awake(self) -> None:
        os.read(self._wake, 4096)
        for channel in self._streams.channels:
            if channel.done and channel.outer not in self._released:
                self._released.add(channel.outer)
                if self.state != LINGERING:
                    self._report(protocol.Released(channel.outer))

    def _read_commands(self) -> None:
        for message in self._inbox.read():
            self._obey(message)
        if self._inbox.closed:
            self.step(CLOSED)

    def _obey(self, message: protocol.Message | None) -> None:
        if message is None:
            self.step(CLOSED)
        elif isinstance(message, protocol.Signal) and message.ranks is not None:
            self.step(SIGNAL_RANKS, message)
        else:
            self.step(type(message), message)

    # --- actions ---------------------------------------------------------------------------

    def _close_inbox(self) -> None:
        self._unwatch(self._inbox.fd)

    def _release_pipe_and_held(self) -> None:
        """Close the report pipe and the held descriptors: from now on only output is copied."""
        for fd in (self._reports, *self._held):
            os.close(fd)

    def _signal_command(self, message: protocol.Signal) -> None:
        if self._family.status is None:
            os.kill(self._family.first, message.number)  # not reaped, so the pid is still its own

    def _signal_ranks(self, message: protocol.Signal) -> None:
        living, number = self._family.living(), message.number
        for pid in user_signals.receivers(self._family.first, living, message.ranks or (), number):
            process_tree.send_signal(pid, living[pid], number)

    def _resize(self, message: protocol.Resize) -> None:
        self._streams.resize()
        if not self._own_group and self._family.status is None:
            os.kill(self._family.first, signal.SIGWINCH)  # the kernel's came before the new size

    def _prepare(self, message: protocol.Prepare) -> None:
        """Start a warm agent; if that fails, the job will start without one."""
        if self._agent:
            return
        try:
            from saferun.keeper import warm_agent  # needed only before an attempt
        except (ImportError, OSError):  # our files are gone, or going just now
            return
        if message.own_group and os.getsid(0) != os.getpid():
            os.setsid()
        try:
            self._agent = warm_agent.WarmAgent(message, self._streams.files)
        except OSError:
            return

    def _dismiss(self) -> None:
        """End a warm agent that is not needed."""
        agent, self._agent = self._agent, None
        if agent:
            self._family.end()
            self._family.reap()
            agent.close()

    def _start(self, message: protocol.Start) -> None:
        self._watch(self._wake, self._awake)
        self._watch(self._inbox.fd, self._read_commands)
        self._gpu_prefix, self._own_group = message.gpu_prefix, message.own_group
        try:
            self._streams.renew(message.tail_bytes)
            self._streams.start()
            self._execute(message)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._report(protocol.Failed(reason, message.argv[0]))
            self.step(FAILED)
            return
        self._streams.release()
        release_inherited()
        self.step(BORN)

    def _execute(self, message: protocol.Start) -> None:
        if message.own_group and os.getsid(0) != os.getpid():
            os.setsid()
        if message.cold and self._agent:
            self._dismiss()
            self._cold = message.cold
        if self._agent:
            self._hand_over(self._agent, message)
        else:
            self._family.first = start_program(self._cold_program(message), self._streams.files)
            self._report_start()
        if not message.own_group:
            os.setsid()  # the job stays in the process group in which it started

    def _report_start(self) -> None:
        self._report(protocol.Started(self._family.first, self._streams.exact, self._cold))

    def _cold_program(self, message: protocol.Start) -> protocol.Start:
        """Return the program for a new process; its environment says why no warm one became it."""
        told = {message.mark: f"spawn {self._cold}"} if message.mark and self._cold else {}
        return message._replace(env={**message.env, **told})

    # --- the warm agent --------------------------------------------------------------------

    def _hand_over(self, agent: WarmAgent, message: protocol.Start) -> None:
        """Make the warm agent the job, or start another process if it has died.

        A signal during that time is meant for the job: an agent that dies of it counts as the job.
        """
        self._family.first = agent.pid
        self._streams.release()
        handed = agent.hand_over(message)
        answer = self._await_answer(agent) if handed else b""
        signalled = answer == b"" and (self.state == SIGNALLED or (handed and self._died_of_key()))
        over = self.state == HURRIED or signalled
        if over or answer == b"r":
            agent.pass_output_on()
            # Our parent passes on keys that come before the report. The agent continues only after
            # it, since signals that it gets itself must not come twice.
            self._report_start()
            if not over:
                agent.go()
            self._agent = None
            agent.close()
            return
        self._cold = _LATE if answer is None else answer.decode("utf-8", "replace") or _ENDED
        files = [os.dup(file) for file in agent.files]
        self._dismiss()
        program = self._cold_program(message)
        self._family.first, self._family.status = start_program(program, files), None
        self._report_start()
        for file in files:
            os.close(file)

    def _await_answer(self, agent: WarmAgent) -> bytes | None:
        """Return the agent's answer; b"" if the agent has died, None if no answer comes in time.

        The answer is "r" if the agent is ready, else the reason why it cannot become the command.
        """
        answer: list[bytes] = []
        self._watch(agent.answers, lambda: answer.append(os.read(agent.answers, 4096)))
        limit = time.monotonic() + _HANDOVER_S
        while not answer and self.state != HURRIED and time.monotonic() < limit:
            self._turn(_RELAY_S)
            agent.relay()
        self._unwatch(agent.answers)
        return answer[0] if answer else None

    def _died_of_key(self) -> bool:
        """Return whether a key at the terminal ended the agent, which gets keys like a job."""
        limit = time.monotonic() + _DEATH_S
        while self._family.status is None and time.monotonic() < limit:
            self._turn(_RELAY_S)
        status = self._family.status or 0
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) in DEATH_SIGNALS

    # --- the end ---------------------------------------------------------------------------

    def _end_the_rest(self) -> tuple[int, list[int]]:
        """End the command's leftovers; return the number killed and the pids that live on."""
        mine = self._family
        if not mine.reap():
            return 0, []
        if mine.status == 0 and self.state == EXITED:
            # The job detached the others on purpose, and torchrun would leave them, too.
            return mine.end_openers(self._gpu_prefix)
        return mine.end()

    def _drain(self) -> None:
        """Copy the rest of the output; when HURRIED, only while its reader takes it immediately."""
        # All writers have ended: once a channel has been empty, everything has been copied.
        self._streams.flush()
        limit = None
        while not self._streams.settled():
            if self.state == HURRIED and limit is None:
                limit = time.monotonic() + protocol.HURRIED_DRAIN_S
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return
            self._turn(left)

    def _report_end(self, killed: int, unkillable: list[int], writers: bool) -> None:
        status = self._family.status
        status = int(signal.SIGKILL) if status is None else status  # it could not be killed
        ended = protocol.Ended(
            wait_status=status,
            killed=killed,
            unkillable=unkillable,
            tails=self._streams.tails(),
            heads=self._streams.heads(),
            merged=self._streams.merged,
            lingers=status == 0 and writers and not self._streams.done(),
        )
        self._report(ended)
        if ended.lingers:
            self.step(LINGER)

    def _report(self, report: protocol.Report) -> None:
        protocol.send(self._reports, report)


# (state, event) -> (action, next state). Commands may be late: a command that saferun sent before
# it read a report is still accepted in the state after that report.
TABLE: Table = {
    (WAITING, protocol.Prepare): (Keeper._prepare, WAITING),
    (WAITING, protocol.Start): (Keeper._start, STARTING),
    (WAITING, CLOSED): (Keeper._dismiss, GONE),
    **rows((STARTING, SIGNALLED), [BORN], None, RUNNING),
    **rows([HURRIED], [BORN], None),
    **rows((STARTING, SIGNALLED, HURRIED), [FAILED], None, GONE),
    (RUNNING, EXIT): (None, EXITED),
    **rows((EXITED, HURRIED), [LINGER], Keeper._release_pipe_and_held, LINGERING),
    **rows((STARTING, SIGNALLED), [protocol.Signal], Keeper._signal_command, SIGNALLED),
    **rows((RUNNING, HURRIED), [protocol.Signal], Keeper._signal_command),
    **rows((EXITED, LINGERING), [protocol.Signal], None),
    **rows(UNREPORTED, [protocol.Kill], None, HURRIED),
    **rows([LINGERING], [protocol.Kill], None),
    **rows(UNREPORTED, [CLOSED], Keeper._close_inbox, HURRIED),
    **rows([LINGERING], [CLOSED], Keeper._close_inbox),
    **rows(WITH_JOB, [SIGNAL_RANKS], Keeper._signal_ranks),
    **rows(WITH_JOB, [protocol.Resize], Keeper._resize),
}
