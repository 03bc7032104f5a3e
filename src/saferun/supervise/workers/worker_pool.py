"""Several workers of one run (`launcher: python`), each under its own supervisor process.

    saferun -> supervisor of a worker (loop.py) -> keeper -> python
            -> supervisor of another            -> keeper -> python

saferun gives each worker its slot on a GPU, forks a supervisor for it (worker.py), passes signals
on, and waits. A worker's failure does not affect the others.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from saferun.base import prctl
from saferun.base.durations import seconds
from saferun.errors import EXIT_BUSY, EXIT_UNAVAILABLE, BusyError, UsageError
from saferun.gpu.lock import gpu_locks, lock_owner
from saferun.gpu.lock.slots import Slot, Slots
from saferun.journal.event_types import RunEnded, WorkerBegun, WorkersBegun
from saferun.journal.writer import Journal
from saferun.keeper import process_tree
from saferun.keeper.job import DEATH_SIGNALS
from saferun.planning.inputs import RunInputs
from saferun.planning.own_variables import VISIBLE
from saferun.planning.view import announcement, as_json
from saferun.settings import LockPolicy
from saferun.supervise import gpu_gate
from saferun.supervise.attempt.end_requests import END_SIGNALS, USER_SIGNALS, outlive_signals
from saferun.supervise.attempt_end import INTERRUPTED
from saferun.supervise.loop import RunEnd, Say
from saferun.supervise.records import record
from saferun.supervise.workers.worker import Part, be_supervisor, last_words, prefixed
from saferun.system import gpus, procfs
from saferun.system.signalfd import Signals

_KEEPER_S = 5.0  # for the keeper of a killed supervisor to end its job
_LOOK_S = 0.01  # between two checks of that, each of which reads all of /proc in some 10 ms
_POLL_S = (0.05, 1.0)  # first and longest pause between two looks for a free slot


@dataclass(frozen=True, slots=True)
class _Running:
    """A worker whose supervisor is running."""

    pid: int
    slot: Slot
    report: int  # descriptor of its final report


def supervise(gathered: RunInputs, say: Say) -> int:
    """Run the workers until all have ended.

    Args:
        gathered: the inputs of every attempt's plan.
        say: function that takes lines for people.

    Returns:
        0 if all succeeded, else the status of the first worker that finally failed.

    Raises:
        BusyError: there are not enough slots for all workers, and the policy is to refuse.
        KeyboardInterrupt: a SIGINT ended the run; everything is closed.
    """
    outlive_signals()  # the forked supervisors, too
    if gathered.request.line.script == "-" and not gathered.request.options.code:
        raise UsageError("several workers cannot read one script from stdin", fix="name a file")
    gathered, journal = record.begin(gathered, say)
    try:
        plan = gathered.plan()
        if VISIBLE in plan.env:  # from the profile or --set: the run sees fewer GPUs than exported
            seen = gpus.detect(plan.environment(gathered.environ))
            gathered = gathered._replace(facts=gathered.facts._replace(gpu=seen))
        exported = plan.environment(gathered.environ).get(VISIBLE)
        run_of_all = _Workers(gathered, journal, say, exported)
        run_of_all.take_slots()
    except BaseException:
        journal.discard()
        raise
    say(announcement(plan))
    journal.plan(as_json(plan))
    status = run_of_all.go()
    if status == run_of_all.asked + 128 == INTERRUPTED:
        raise KeyboardInterrupt  # as in loop.py
    return status


class _Workers:
    """The workers of one run.

    Args:
        gathered: the inputs of every attempt's plan.
        journal: the run's journal.
        say: function that takes lines for people.
        exported: CUDA_VISIBLE_DEVICES of the whole run; None if it is not set.
    """

    def __init__(
        self, gathered: RunInputs, journal: Journal, say: Say, exported: str | None
    ) -> None:
        assert gathered.profile is not None, "a run with workers has a profile"
        self._gathered, self._journal, self._say = gathered, journal, say
        self._exported = exported
        self._count = gathered.profile.settings.workers
        self._policy: LockPolicy = gathered.profile.settings.locks
        command = gpu_gate.command(gathered.request)
        # Every worker's lock would have the same problem, so each line is printed once.
        world = gpu_locks.Surroundings(functools.cache(say))
        memory = gpu_locks.slot_memory(self._policy, gathered.environ, world)
        self._slots = Slots(
            gathered.facts.gpu.gpus,
            self._policy,
            lock_owner.this_process(command, gathered.identity.run),
            gathered.environ,
            world._replace(memory=memory),
        )
        self._ready: dict[int, Slot] = {}  # workers with a slot that are not started
        self._waiting: list[int] = []
        self._running: dict[int, _Running] = {}
        self._left: set[int] = set()  # processes that successful workers left on purpose
        self._failed: tuple[int, RunEnd] | None = None  # the first worker that failed
        self.asked = 0  # the first signal that asked the run to end
        self._signals: Signals  # set while `go` runs
        self._began = time.monotonic()
        self._pause = _POLL_S[0]

    # --- slots -----------------------------------------------------------------------------

    def take_slots(self) -> None:
        """Take a slot for each worker, or follow the policy if there are not enough.

        Raises:
            BusyError: the policy is to refuse.
        """
        for number in range(self._count):
            slot = self._slots.take()
            if slot is None:
                self._waiting.append(number)
            else:
                self._ready[number] = slot
        if not self._waiting:
            return
        count = self._slots.count
        what = self._slots.message
        if count is not None and count < self._count:
            what = f"{self._count} workers, and {count} slots ({self._slots.describe()}): {what}"
        if self._policy.gpus != "wait" or self._policy.wait_s <= 0:
            for slot in self._ready.values():
                self._slots.give_back(slot)
            fix = "lower workers, raise locks.slots, or start all the same: --set locks.gpus=warn"
            raise BusyError(what, where=f"locks.gpus: {self._policy.gpus}", fix=fix)
        bound = f"up to {seconds(self._policy.wait_s)} (locks.gpus: wait)"
        self._say(f"{what}; {_named(self._waiting)} for a slot {bound}")

    def _look_for_slots(self) -> None:
        """Start the waiting workers for which there are now slots."""
        while self._waiting and (slot := self._slots.take()):
            self._start(self._waiting.pop(0), slot)
            self._pause = _POLL_S[0]
        self._pause = min(self._pause * 1.5, _POLL_S[1])
        if self._waiting and time.monotonic() >= self._began + self._policy.wait_s:
            waited = f"waited {seconds(self._policy.wait_s)} (locks.gpus: wait)"
            for number in self._waiting:
                self._say(f"worker {number} was never started: {self._slots.message}; {waited}")
                self._never(number, EXIT_BUSY, f"no slot was free: {waited}")
            self._waiting.clear()

    # --- the run ---------------------------------------------------------------------------

    def go(self) -> int:
        """Start the workers and wait for them; return the exit status of the run."""
        prctl.become_subreaper()
        self._journal.share()
        self._journal.event(WorkersBegun(self._count, procfs.this_process()))
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, no status is kept
        self._signals = Signals((*DEATH_SIGNALS, *USER_SIGNALS, signal.SIGCHLD))
        try:
            with self._signals:
                try:
                    self._attend()
                finally:
                    self._kill_all()
        finally:
            signal.signal(signal.SIGCHLD, before)
        return self._over()

    def _attend(self) -> None:
        for number in list(self._ready):
            self._take_signals()
            if not self.asked:
                self._start(number, self._ready.pop(number))
        poller = select.poll()
        poller.register(self._signals.fd, select.POLLIN)
        while self._running or (self._waiting and not self.asked):
            poller.poll(self._pause * 1000 if self._waiting else None)
            self._take_signals()
            self._reap()
            if self._waiting and not self.asked:
                self._look_for_slots()

    def _over(self) -> int:
        """Record the end of the run; return its status."""
        number, end = self._failed or (0, RunEnd(0))
        status, reason = end.status, ""
        if self._failed is not None:
            reason = f"worker {number}: {end.reason}" if end.reason else f"worker {number} failed"
            if not self.asked and end.verdict:
                record.leave_verdict(self._gathered.environ, end.verdict)
        if self.asked:
            reason = "asked to end"
            if self._failed is None and (self._ready or self._waiting):
                status = 128 + self.asked
        elif status and self._count > 1:
            self._say(f"the run failed with status {status}, that of worker {number}")
        whole = record.for_run(self._journal, self._gathered, self._gathered.plan(), self._say)
        whole.end(status, reason, asked=bool(self.asked) or end.asked)
        whole.close()
        return status

    def _take_signals(self) -> None:
        """Pass on signals sent only to saferun; those from a key or Slurm reach all processes."""
        for number, sender in self._signals.read():
            if number == signal.SIGCHLD:
                continue
            if number in END_SIGNALS and not self.asked:
                self.asked = number
            if sender == "":
                for one in self._running.values():
                    os.kill(one.pid, number)

    # --- one worker ------------------------------------------------------------------------

    def _start(self, number: int, slot: Slot) -> None:
        """Start the supervisor of a worker; if that fails, the others continue."""
        reading, writing = os.pipe()
        part = Part(number, slot, self._slots.visible(slot, self._exported), writing, os.getpid())
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            reason = f"it was never started: {error.strerror}"
            prefixed(self._say, number)(reason)
            self._slots.give_back(slot)
            self._never(number, EXIT_UNAVAILABLE, reason)
            return
        if not pid:
            be_supervisor(part, self._gathered, self._journal, self._say, self._leave)
        os.close(writing)
        slot.held.hand_over()
        self._running[number] = _Running(pid, slot, reading)
        gpu = slot.gpu.uuid if slot.gpu else None
        self._journal.event(WorkerBegun(pid, gpu), worker=number)

    def _leave(self) -> None:
        """Release, in a newly forked supervisor, what belongs only to saferun."""
        self._signals.__exit__()
        for other in self._ready.values():  # otherwise it would hold their locks, too
            other.held.hand_over()

    def _reap(self) -> None:
        """Record the workers that have ended."""
        for number, one in list(self._running.items()):
            pid, wait_status = os.waitpid(one.pid, os.WNOHANG)
            if not pid:
                continue
            del self._running[number]
            end = last_words(one.report)
            if os.WIFSIGNALED(wait_status):
                status, reason = self._killed(number, os.WTERMSIG(wait_status))
            else:
                status, reason = os.WEXITSTATUS(wait_status), end.reason
                self._left.update(self._family().living())
            self._slots.give_back(one.slot)
            self._end(number, end._replace(status=status, reason=reason))

    def _killed(self, number: int, signum: int) -> tuple[int, str]:
        """End what a killed supervisor left; return the worker's status and the reason."""
        self._end_orphans()
        reason = "asked to end" if self.asked else f"its supervisor was killed (signal {signum})"
        if not self.asked:
            prefixed(self._say, number)(reason)
        self._journal.event(RunEnded(128 + signum, reason, asked=bool(self.asked)), worker=number)
        return 128 + signum, reason

    def _never(self, number: int, status: int, reason: str) -> None:
        """Record a worker that never started."""
        self._journal.event(RunEnded(status, reason), worker=number)
        self._end(number, RunEnd(status, reason, at_s=time.monotonic()))

    def _end(self, number: int, end: RunEnd) -> None:
        if end.status and (self._failed is None or end.at_s < self._failed[1].at_s):
            self._failed = number, end

    def _family(self) -> process_tree.Family:
        """Return our descendants, except running workers and what others left on purpose."""
        running = [one.pid for one in self._running.values()]
        return process_tree.Family(lambda: (*running, *self._left))

    def _end_orphans(self) -> None:
        """Wait for the keeper of a killed supervisor, then end what is left."""
        family, limit = self._family(), time.monotonic() + _KEEPER_S
        while family.living() and time.monotonic() < limit:
            time.sleep(_LOOK_S)
        family.end()

    def _kill_all(self) -> None:
        """End the workers after a fault of saferun itself; usually there are none."""
        for slot in self._ready.values():
            self._slots.give_back(slot)
        if not self._running:
            return
        for one in self._running.values():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            self._slots.give_back(one.slot)
        self._running.clear()
        self._end_orphans()


def _named(numbers: Sequence[int]) -> str:
    """Return "worker 3 waits" or "workers 3, 4 wait"."""
    listed = ", ".join(map(str, numbers))
    return f"worker {listed} waits" if len(numbers) == 1 else f"workers {listed} wait"
