"""Watch a running attempt for a hang: look at it now and then, and say where its ranks are.

It looks at /proc alone (work_signs.py). Only where a silence is too long are the ranks asked, by a
signal, for their stacks, which faulthandler writes to a file of each (inject/hooks/excepthook.py),
and torch's flight recorder for the collectives that each rank has called (flight_dumps.py), and
NCCL for those that each has launched (ras_query.py). When
they have answered, py-spy is asked for the stacks of C++, where it is installed (native_stacks.py);
it stops a rank while it reads it, so that the state of each rank is that of the look before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from saferun.diagnosis import flight_record, silence
from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.flight_record import Finding
from saferun.diagnosis.silence import Helper, Look, Place, Silence
from saferun.inject import contract
from saferun.inject.durations import seconds
from saferun.keeper import process_tree
from saferun.model import LaunchPlan
from saferun.supervise.records.record import Record
from saferun.supervise.watch import work_signs
from saferun.supervise.watch.flight_dumps import FlightDumps
from saferun.supervise.watch.native_stacks import NativeStacks
from saferun.supervise.watch.weak_activity import WeakActivity
from saferun.supervise.watch.work_signs import Tree

if TYPE_CHECKING:  # only a silence needs it
    from saferun.supervise.watch.ras_query import RasQuery

_EVERY_S = 15.0  # between looks
_TREE_S = 60.0  # between two readings of all processes of the machine, while the job works
_FIRST = 8  # looks, in which the job starts
_ANSWER_S = 2.0  # the most that ranks get to write their stacks
_AGAIN_S = 0.25  # between looks for the answers
_HELD = ("D", "T", "t")  # take no signal now
_STACK_BYTES = 256 * 1024  # read of each file

Say = Callable[[str], None]


class _Asked:
    """Who was asked where it is, and when.

    Args:
        since: the look with which the silence began.
        before: the look before anybody was asked.
        files: pid -> the file of its stacks, and its size before.
        flight: what torch's flight recorder was asked for.
        ras: what NCCL was asked for.
        environ: the user's.
        spies: py-spy is asked, too.
    """

    def __init__(
        self,
        since: Look,
        before: Look,
        files: dict[int, tuple[str, int]],
        flight: FlightDumps,
        ras: RasQuery,
        environ: Mapping[str, str],
        *,
        spies: bool,
    ) -> None:
        self.since, self.before, self.files = since, before, files
        self.flight, self.ras = flight, ras
        self.helpers: list[Helper] = work_signs.helpers(one.pid for one in before.ranks)
        self.native: NativeStacks | None = None
        self._until_s = before.at_s + _ANSWER_S
        self._sizes: dict[int, int] = {}  # pid -> the size of its file at the last look
        self._environ, self.spies = environ, spies
        self._have_answered = False

    def are_ready(self, now: Look) -> bool:
        if not self._have_answered:
            able = {one.pid for one in now.ranks if one.state not in _HELD}
            if not self._are_written(able) and now.at_s < self._until_s:
                return False
            self._have_answered = True
            self.native = self._ask_py_spy(now.at_s) if self.spies else None
        native = self.native is None or self.native.are_ready(now.at_s)
        flight, ras = self.flight.are_ready(now.at_s), self.ras.are_ready(now.at_s)
        return native and flight and ras

    def _ask_py_spy(self, at_s: float) -> NativeStacks:
        pids = (*(one.pid for one in self.before.ranks), *(one.pid for one in self.helpers))
        return NativeStacks(pids, self._environ, at_s)

    def _are_written(self, able: set[int]) -> bool:
        """Return whether those who can answer have written something, and nothing more since."""
        last = dict(self._sizes)
        self._sizes.update({pid: _size(path) for pid, (path, _) in self.files.items()})
        asked = {pid: before for pid, (_, before) in self.files.items() if pid in able}
        return all(before < self._sizes[pid] == last.get(pid) for pid, before in asked.items())


class HangWatch:
    """Watches one attempt for a hang.

    Args:
        plan: the attempt's.
        receipts: the directory of the ranks' receipts; None where there is none.
        record: the run's journal.
        say: takes lines for people.
        environ: the user's.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        receipts: str | None,
        record: Record,
        say: Say,
        environ: Mapping[str, str],
    ) -> None:
        self._receipts, self._record, self._say = receipts, record, say
        self._environ = environ
        self._gpus = [gpu.uuid for gpu in plan.gpus.gpus]
        self._weak: WeakActivity | None = None
        policy = plan.settings.watch
        self._silence: Silence = Silence(policy.silence_s)
        self._every_s = min(_EVERY_S, (policy.silence_s or _EVERY_S * 4) / 4)
        self._launcher = 0
        self._asked: _Asked | None = None
        self._tree: Tree = {}
        self._tree_until_s = 0.0
        self._ranks: list[int] = []
        self._looks = 0
        self._ends = policy.mode == "end"
        self._stall_is_told = False
        self._is_wanted = False  # a person asked where the ranks are
        self.cause: Hang | None = None  # why the attempt was ended

    def started(self, keeper: int, launcher: int) -> None:
        """Note which command runs."""
        self._launcher = launcher

    def ask(self) -> None:
        """Have the next look followed by a report, however busy the job is."""
        self._is_wanted = True

    def check_job(self) -> float | None:
        """Return the seconds until the next check of the job, None to end it. Never raises."""
        try:
            return self._check_job()
        except Exception as error:
            self._record.fault(error)
            return self._every_s

    def _check_job(self) -> float | None:
        now = self._now(time.monotonic())
        if now is None:
            return self._every_s
        if self._asked is not None:
            if not self._asked.are_ready(now):
                return _AGAIN_S
            asked, self._asked = self._asked, None
            self._report(asked, now)
            self._silence.answered(now)
            return self._every_s if self.cause is None else None
        if self._silence.is_near(now):
            self._look_closer(now)
        began = self._silence.take(now, self._every_s)
        if self._is_wanted:
            began = self._silence.with_ended(now)
        if self._stall_is_told and not self._silence.is_stalled:
            self._stall_is_told = False
            self._record.stall("")
        stall = self._silence.stalls(now) if began is None else None
        if began is None and stall is None:
            return self._silence.look_again_s(now.at_s, self._every_s)
        self._asked = self._ask(began or stall or now, now, spies=began is not None)
        return _AGAIN_S

    def _now(self, at_s: float) -> Look | None:
        """Look at the job. Who has started since a while is looked for only where it may matter."""
        matters = self._asked or self._is_wanted or self._silence.is_quiet(at_s)
        if matters or at_s >= self._tree_until_s:
            self._tree, self._tree_until_s = work_signs.tree(), at_s + _TREE_S
        now = work_signs.observe_job(self._launcher, at_s, self._tree)
        ranks = [one.pid for one in now.ranks] if now else []
        self._looks += 1
        if ranks != self._ranks or self._looks < _FIRST:
            self._ranks, self._tree_until_s = ranks, at_s
        return now

    def _look_closer(self, now: Look) -> None:
        """Look for signs of work that cost more."""
        if self._weak is None:
            self._weak = WeakActivity(self._environ, self._gpus)
        if self._weak.seen(now.at_s, work_signs.everyone(one.pid for one in now.ranks)):
            self._silence.note_busy(now.at_s)

    def _ask(self, began: Look, now: Look, *, spies: bool) -> _Asked:
        from saferun.supervise.watch.ras_query import RasQuery  # only a silence needs it

        flight = FlightDumps(now.ranks, now.at_s)
        ras = RasQuery(now.ranks, now.at_s, is_wanted=bool(self._gpus))
        files = self._ask_ranks(now)
        return _Asked(began, now, files, flight, ras, self._environ, spies=spies)

    def _ask_ranks(self, now: Look) -> dict[int, tuple[str, int]]:
        """Ask the ranks for their stacks; return the file of each, and its size before.

        A rank without the handler would die of the signal, so it is left alone.
        """
        files: dict[int, tuple[str, int]] = {}
        names = os.listdir(self._receipts) if self._receipts else []
        for one in now.ranks:
            ending = f"-pid{one.pid}{contract.STACKS}"
            for name in (name for name in names if name.endswith(ending)):
                path = os.path.join(self._receipts or "", name)
                if process_tree.catches(one.pid, contract.STACKS_SIGNAL):
                    files[one.pid] = path, os.path.getsize(path)
                    os.kill(one.pid, contract.STACKS_SIGNAL)
        return files

    def _report(self, asked: _Asked, now: Look) -> None:
        native, since = asked.native.take() if asked.native else {}, asked.since
        written = {pid: text for pid, file in asked.files.items() if (text := _tail(*file))}
        by_py_spy = {pid: silence.from_py_spy(text) for pid, text in native.items()}
        by_ras = asked.ras.finding()

        def places(behind: tuple[int, ...]) -> list[Place]:
            at_gpu = [pid for pid, text in native.items() if silence.waits_for_gpu(text)]
            stacks = {**by_py_spy, **written}
            return silence.places(since, asked.before, stacks, asked.helpers, behind, at_gpu)

        found = places(())
        # A rank whose own stack shows it in a collective is none that gives no record.
        unlike = asked.flight.asked - {place.rank for place in found if place.collective}
        finding = flight_record.compare(asked.flight.take(), unlike)
        told = flight_record.cause(finding) if finding else None
        if finding and finding.ranks:
            found = places(finding.ranks)
        elif by_ras and not any(place.odd for place in found):
            found = places(by_ras.ranks)  # it overrules no other sign
        if not asked.spies:  # a stall: nothing is said of it but in the journal
            call = (finding or by_ras or Finding("", (), "")).call
            if line := silence.waiting(found, seconds(now.at_s - since.at_s), call):
                self._record.stall(line, now.at_s - since.at_s, found)
                self._stall_is_told = True
            return
        wanted, self._is_wanted = self._is_wanted, False
        silent = "" if wanted else seconds(now.at_s - since.at_s)
        lines = silence.report(found, silent, told)
        self._say("\n".join([*lines, *([f"  NCCL's RAS: {by_ras.line}"] if by_ras else [])]))
        if self._ends and not wanted:
            self.cause = silence.cause(found, told)
        silent_s = round(now.at_s - since.at_s, 1)
        if path := self._record.hang(found, silent_s, native, asked=wanted):
            self._say(f"  all stacks, those of C++ too: {path}")


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _tail(path: str, before: int) -> str:
    """Return what was added to a file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            file.seek(before)
            return file.read(_STACK_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
