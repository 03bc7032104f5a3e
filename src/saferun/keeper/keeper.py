"""Stand between saferun and one attempt's job, and leave nothing of the job behind.

    saferun -> keeper -> torchrun -> ranks -> DataLoader workers, compile workers, …

The keeper is a session of its own and a *subreaper*: whatever the job leaves without a parent
becomes the keeper's child, also what has changed its session or its group. When the job ends, or
when the pipe from saferun closes because saferun died, the keeper freezes all descendants (a
frozen process makes no new ones), kills them, and reports. Should the keeper itself be killed,
saferun is the next subreaper and does the same with the same code.

It also carries the job's output (output_relay.py), because it must go on while saferun is stopped
by Ctrl-Z: torchrun's ranks go on then, too.

    under_saferun(IN, OUT)   a task comes in on IN, reports go out on OUT

Standard library only: it is a process of its own without site-packages. Only this room is imported
there.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time

from saferun.keeper import process_tree, protocol

TYPE_CHECKING = False  # typing costs 5 ms at the start of every attempt
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from saferun.keeper.output_relay import Streams
    from saferun.keeper.warm_agent import Waiting

_HANDOVER_S = 60.0  # for a spare to finish its import from a cold disk; then another is started
_SET_PDEATHSIG, _SET_NAME = 1, 15  # linux/prctl.h
_DEATH_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_DEAF_TO = (
    *_DEATH_SIGNALS,
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH),
)


# --- the job -----------------------------------------------------------------------------------


def start_job(task: dict[str, Any], files: list[int]) -> int:
    """Fork and execute the task's command with `files` as its descriptors 1 and 2.

    Returns:
        Its pid.

    Raises:
        OSError: it could not be executed.
    """
    reading, writing = os.pipe()
    keeper = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            _become_job(task, files, keeper)
        except OSError as error:
            os.write(writing, b"%d" % (error.errno or 0))
        finally:
            os._exit(127)
    os.close(writing)
    failure = os.read(reading, 32)
    os.close(reading)
    if failure:
        os.waitpid(pid, 0)
        raise OSError(int(failure), os.strerror(int(failure)), task["argv"][0])
    return pid


def _become_job(task: dict[str, Any], files: list[int], keeper: int) -> None:
    if task["own"] == "group":
        os.setpgid(0, 0)
    elif task["own"] == "session":
        os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(file, number, inheritable=True)
    for file in task.get("passed", ()):
        os.set_inheritable(file, True)
    for number in (*_DEAF_TO, signal.SIGCHLD):
        ignored = number in task["ignored"]
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if task.get("nofile"):
        _raise_open_files(task["nofile"])
    process_tree.prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != keeper:
        os._exit(127)  # the keeper died in between, and nobody would have told us
    signal.pthread_sigmask(signal.SIG_SETMASK, task["blocked"])
    os.execvpe(task["argv"][0], task["argv"], task["env"])  # noqa: S606


def _raise_open_files(wanted: int) -> None:
    import resource  # only where a mitigation asks for it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Keeper:
    """Runs one job and ends what is left of it.

    Args:
        streams: carry its output.
        reports: descriptor to tell saferun on.
        held: descriptors that nobody else may get while the job lives.
    """

    def __init__(self, streams: Streams, reports: int, held: Sequence[int]) -> None:
        self._reports = reports
        self._held = held
        self._streams = streams
        self._family = process_tree.Family()
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._own_group = True
        self._spare: Waiting | None = None
        self._signalled = False
        self.hurry = False  # saferun died, or wants the job to be killed

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler()` whenever there is something to read on `fd`."""
        self._poller.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Look at `fd` no more."""
        if self._handlers.pop(fd, None):
            self._poller.unregister(fd)

    def turn(self, limit_s: float | None = None) -> None:
        """Wait for something to happen and deal with it."""
        for fd, _ in self._poller.poll(None if limit_s is None else limit_s * 1000):
            self._handlers[fd]()
        self._family.reap()

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        """Signal the command, or those of `ranks` that have a handler for it.

        Where ranks are named the command gets it instead if it has a handler itself (torchrun
        has one for what `--signals-to-handle` lists, and dies of what it has none for).
        """
        if ranks is None or process_tree.catches(self._family.first, number):
            self._signalled = True
            if self._family.status is None:
                os.kill(self._family.first, number)  # not reaped: the number is still its own
            return
        for pid, start in self._family.living().items():
            if pid in ranks and process_tree.catches(pid, number):
                process_tree.send_signal(pid, start, number)

    def resize(self) -> None:
        """The terminal has a new size."""
        self._streams.resize()
        if not self._own_group:
            self.signal(signal.SIGWINCH)  # the kernel's came before the size was copied

    def run(self, task: dict[str, Any]) -> int:
        """Run the task to its very end and return the job's wait status.

        Raises:
            OSError: the command could not be executed.
        """
        self._start(task)
        began = time.monotonic()
        while self._family.status is None and not self.hurry:
            self.turn()
        self.report("exited", time.monotonic() - began)
        killed, unkillable = self._end(task["gpu_prefix"])
        self._drain()
        status = self._family.status
        status = int(signal.SIGKILL) if status is None else status  # it would not die
        survivors = status == 0 and self._family.reap() and bool(self._family.living())
        ends = (*self._streams.tails(), *self._streams.heads())
        lingers = survivors and not self._streams.done()
        self.report("ended", status, killed, unkillable, *ends, self._streams.merged, lingers)
        if lingers:
            self._linger()
        return status

    def prepare(self, told: dict[str, Any]) -> None:
        """Start a spare interpreter for the task to come; quietly without where there is none."""
        from saferun.keeper import warm_agent  # needed ahead of time only

        if self._spare:
            return
        if os.getsid(0) != os.getpid():
            os.setsid()
        try:
            self._spare = warm_agent.Waiting(told, self._streams.files, start_job)
        except OSError:
            return

    def dismiss(self) -> None:
        """End a spare interpreter that is not wanted."""
        waiting, self._spare = self._spare, None
        if waiting:
            process_tree.end_processes(self._family.living)
            self._family.reap()
            waiting.close()

    def _start(self, task: dict[str, Any]) -> None:
        self._own_group = task["own"] == "group"
        if self._own_group and os.getsid(0) != os.getpid():
            os.setsid()
        self._streams.renew(task["tail_bytes"])
        if not task.get("spare"):
            self.dismiss()
        if self._spare:
            self._hand_over(self._spare, task)
        else:
            self._family.first = start_job(task, self._streams.files)
        if not task["own"]:
            os.setsid()  # the job stays in the group that it was born in
        self.report("started", self._family.first)
        self._streams.start()
        _let_go()

    def _hand_over(self, waiting: Waiting, task: dict[str, Any]) -> None:
        """Make the spare interpreter the job, or start another if it has died.

        A signal that comes meanwhile is meant for the job: a spare that dies of it was the job.
        """
        self._family.first = waiting.pid
        self._streams.start()
        answer = self._await(waiting) if waiting.hand_over(task) else b""
        over = self.hurry or (self._signalled and answer == b"")
        if over or answer == b"r":
            waiting.pass_on()
        if over or (answer == b"r" and waiting.go()):
            self._spare = None
            waiting.close()
            return
        files = [os.dup(file) for file in waiting.files]
        self.dismiss()
        self._family.first, self._family.status = start_job(task, files), None
        for file in files:
            os.close(file)

    def _await(self, waiting: Waiting) -> bytes | None:
        """Return what the spare answers to its task, b"" if it has died; None: nothing in time."""
        answer: list[bytes] = []
        self.watch(waiting.answers, lambda: answer.append(os.read(waiting.answers, 1)))
        limit = time.monotonic() + _HANDOVER_S
        while not answer and not self.hurry and time.monotonic() < limit:
            self.turn(0.05)
            waiting.listen()
        self.unwatch(waiting.answers)
        return answer[0] if answer else None

    def report(self, *message: object) -> None:
        """Tell saferun."""
        protocol.send(self._reports, message)

    def _end(self, gpu_prefix: str) -> tuple[int, list[int]]:
        mine = self._family
        if not mine.reap():
            return 0, []
        if mine.status == 0 and not self.hurry:
            # The job detached the others on purpose, and torchrun would leave them.
            return process_tree.end_processes(
                lambda: {
                    p: s for p, s in mine.living().items() if process_tree.opens(p, gpu_prefix)
                }
            )
        return process_tree.end_processes(mine.living)

    def _drain(self) -> None:
        # Whoever wrote has ended: once a channel has been empty, all has been carried.
        self._streams.flush()
        limit = None
        while not self._streams.settled():
            if self.hurry and limit is None:
                limit = time.monotonic() + protocol.HURRIED_DRAIN_S
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return
            self.turn(left)

    def _linger(self) -> None:
        # Somebody whom the job left behind on purpose may still write. Carry it, as a plain
        # descriptor would, but keep nobody waiting for us.
        for fd in (self._reports, *self._held):
            os.close(fd)
        while not self._streams.done():
            self.turn()


def _let_go() -> None:
    # The job has these; whoever waits for them to be closed should not wait for the keeper.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir("/")


def _prepare() -> tuple[int, int]:
    """Hear nothing but the end of children; return both ends of the pipe that tells of it."""
    process_tree.prctl(_SET_NAME, ctypes.c_char_p(b"saferun-keeper"))
    process_tree.become_subreaper()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _no_op)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return reading, writing


def _no_op(number: int, frame: object) -> None:
    """Be a handler: the number arrives through the wake-up descriptor."""


def under_saferun(commands: int, reports: int, *held: int) -> None:
    """Do the task that comes in on `commands`, and what is asked for until it has ended.

    `held` stay open here, and only here, until nothing of the job lives.
    """
    for fd in (commands, reports, *held):
        os.set_inheritable(fd, False)
    wake, notify = _prepare()
    from saferun.keeper import output_relay

    inbox = protocol.Inbox(commands)
    message = inbox.first()
    try:
        if message is not None:
            keeper = Keeper(output_relay.Streams(0, notify), reports, held)
            _keep(keeper, inbox, message, wake, notify)
    except OSError as error:
        program = message["argv"][0] if isinstance(message, dict) else ""
        protocol.send(reports, ("failed", error.errno, error.strerror, program))
    os._exit(0)  # with carriers that may be stuck in a write


def _keep(keeper: Keeper, inbox: protocol.Inbox, message: Any, wake: int, notify: int) -> None:
    while isinstance(message, tuple):
        keeper.prepare(message[1])
        message = inbox.first()
    if message is None:
        keeper.dismiss()
        return
    keeper.watch(wake, lambda: os.read(wake, 4096) and _do(keeper, inbox.waiting()))
    keeper.watch(inbox.fd, lambda: _obey(keeper, inbox))
    os.write(notify, b"\0")  # for what came together with the task
    keeper.run(message)


def _obey(keeper: Keeper, inbox: protocol.Inbox) -> None:
    _do(keeper, inbox.read())
    if inbox.closed:  # saferun died, or has heard all it wanted to hear
        keeper.hurry = True
        keeper.unwatch(inbox.fd)


def _do(keeper: Keeper, messages: list[Any]) -> object:
    for word, *rest in messages:
        if word == "signal":
            keeper.signal(*rest)
        elif word == "size":
            keeper.resize()
        elif word == "kill":
            keeper.hurry = True
    return None
