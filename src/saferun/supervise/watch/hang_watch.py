"""Watch a running attempt for a hang: look at it regularly, and report where its ranks are.

A look reads only /proc (work_signs.py). If a silence is too long, a signal asks the ranks for their
stacks, which faulthandler writes to one file each (inject/hooks/excepthook.py). torch's flight
recorder is asked for the collectives that each rank has called (flight_dumps.py), and NCCL for
those that each rank has launched (ras_query.py). After their answers, py-spy, if installed, is
asked for the C++ stacks (native_stacks.py). It stops a rank while it reads it, so the state of each
rank is that of the look before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from saferun.base import files
from saferun.base.durations import seconds
from saferun.diagnosis import flight_record, places, silence
from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.explaining import silence_report
from saferun.diagnosis.flight_record import CollectiveFinding
from saferun.diagnosis.places import Helper, Place, Used
from saferun.diagnosis.silence import Look, Silence
from saferun.inject import contract
from saferun.journal import rank_files
from saferun.keeper import process_tree
from saferun.supervise.beside import Beside
from saferun.supervise.watch import work_signs
from saferun.supervise.watch.flight_dumps import FlightDumps
from saferun.supervise.watch.native_stacks import NativeStacks
from saferun.supervise.watch.ras_query import RasQuery
from saferun.supervise.watch.running_job import RunningJob
from saferun.supervise.watch.weak_activity import GpuUse, Traffic
from saferun.supervise.watch.work_signs import Tree

_EVERY_S = 10.0  # between looks
_TREE_S = 60.0  # between two scans of all processes of the machine, while the job works
_FIRST = 8  # number of looks in which the job starts
_AFTER_FAULT_S = 10.0
_ANSWER_S = 2.0  # longest time for ranks to write their stacks
_AGAIN_S = 0.25  # between looks for the answers
# Seconds after a stall in which a collective's own timeout prints, dumps and waits before the job
# ends.
_ECHO_S = 120.0
_HELD = ("D", "T", "t")  # in these states a process handles no signal
_STACK_BYTES = 256 * 1024  # most bytes read of each file


# States of the watch.
WATCHING = "watching"  # nobody is asked
STACKS = "stacks"  # the ranks were asked for their stacks
REST = "rest"  # they have answered or never will; what else was asked has not answered yet


class Question:
    """The processes that were asked where they are, and when.

    Args:
        since: the look with which the silence began.
        before: the look before anybody was asked.
        files: pid -> the file with its stacks, and the file's size before.
        flight: the request to torch's flight recorder.
        ras: the request to NCCL.
        environ: the user's environment.
        used: what the awaited ranks had used before anybody was asked; None without a stall.
        is_stall: the job is not considered hung, so py-spy, which stops ranks, is not asked.
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
        used: Used | None,
        is_stall: bool,
    ) -> None:
        self.used = used
        self.since, self.before, self.files = since, before, files
        self.flight, self.ras = flight, ras
        self.helpers: list[Helper] = work_signs.helpers(one.pid for one in before.ranks)
        self.native: NativeStacks | None = None
        self._until_s = before.at_s + _ANSWER_S
        self._sizes: dict[int, int] = {}  # pid -> size of its file at the last look
        self._environ, self.is_stall = environ, is_stall

    def has_stacks(self, now: Look) -> bool:
        """Return whether no more stacks of ranks will come."""
        able = {one.pid for one in now.ranks if one.state not in _HELD}
        return self._are_written(able) or now.at_s >= self._until_s

    def ask_py_spy(self, at_s: float) -> None:
        """Ask py-spy, unless the job may only be slow."""
        if not self.is_stall:
            pids = (*(one.pid for one in self.before.ranks), *(one.pid for one in self.helpers))
            self.native = NativeStacks(pids, self._environ, at_s)

    def has_rest(self, at_s: float) -> bool:
        """Return whether nothing else will come."""
        native = self.native is None or self.native.are_ready(at_s)
        flight, ras = self.flight.are_ready(at_s), self.ras.are_ready(at_s)
        return native and flight and ras

    def _are_written(self, able: set[int]) -> bool:
        """Return whether all that can answer have written, and have not written more since then."""
        last = dict(self._sizes)
        self._sizes.update({pid: _size(path) for pid, (path, _) in self.files.items()})
        asked = {pid: before for pid, (_, before) in self.files.items() if pid in able}
        return all(before < self._sizes[pid] == last.get(pid) for pid, before in asked.items())


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of the answers."""

    places: list[Place]
    native: Mapping[int, str]  # pid -> py-spy's output
    finding: CollectiveFinding | None  # of the flight recorder
    by_ras: CollectiveFinding | None
    stopped: frozenset[int | None]  # ranks of this machine that are alive

    @property
    def told(self) -> Hang | None:
        return flight_record.cause(self.finding) if self.finding else None

    @property
    def gone(self) -> tuple[int, ...]:
        """Return the ranks that RAS considers gone and, by the flight recorder, others await."""
        awaited = self.finding.awaited if self.finding else ()
        gone = self.by_ras.gone if self.by_ras else ()
        return tuple(rank for rank in gone if rank in awaited and rank not in self.stopped)

    @property
    def wait(self) -> bool:
        """Return whether all ranks of this machine wait for others."""
        by_record = self.finding is not None or (self.by_ras is not None and self.by_ras.call != "")
        are_in = by_record or all(place.collective for place in self.places)
        return are_in and not any(place.odd for place in self.places)

    def cause(self) -> Hang:
        if self.gone and self.by_ras:
            return Hang("hang", self.gone[0], self.by_ras.line)
        return silence_report.cause(self.places, self.told)

    def waiting(self, silent: str) -> str:
        """Return who waits for whom, as a line; "" if unknown."""
        call = next((one.call for one in (self.finding, self.by_ras) if one and one.call), "")
        far = self.by_ras.line if self.by_ras and not self.by_ras.ranks else ""
        return silence_report.waiting(self.places, silent, call, far)

    def stalled(self, line: str) -> Hang:
        """Return the rank that others wait for, and a line about it."""
        odd = [place.rank for place in self.places if place.odd]
        rank = next(iter([*odd, *(self.by_ras.gone if self.by_ras else ())]), None)
        return Hang("hang", rank, line)


@dataclass(frozen=True, slots=True)
class _Stall:
    """Ranks that wait for others."""

    odd: tuple[int, ...]  # pids of the awaited ranks
    noted: Look  # the look after it was noted
    used: Used  # resources that these used until then
    functions: set[str]  # functions in which these are
    since_s: float  # when the silence began
    works: bool = False  # these were seen to work when the stall could have been said


class HangWatch(Beside):
    """Watch one attempt for a hang.

    Args:
        job: the attempt.
    """

    again_s = _AFTER_FAULT_S  # any other watch would ask ranks again

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._gpus = [gpu.uuid for gpu in job.plan.gpus.gpus]
        self._gpu_use, self._last_traffic = GpuUse(job.environ, self._gpus), Traffic()
        policy = job.plan.settings.watch
        least = 1 if job.plan.options.nodes != 1 else 2
        self._silence: Silence = Silence(policy.silence_s, job.longest, least)
        self._every_s = min(_EVERY_S, (policy.silence_s or _EVERY_S * 4) / 4)
        self.state = WATCHING
        self._question: Question | None = None  # the one that is open
        self._tree: Tree = {}
        self._tree_until_s = 0.0
        self._ranks: list[int] = []
        self._looks = 0
        self._ends = policy.mode == "end"
        self._stall: _Stall | None = None  # the present stall
        self._traffic = Traffic()
        # Length of the stall at which its ranks are asked again: to report it, to end the attempt.
        self._loud_s = self._gone_s = float("inf")
        # The last stall, and when it ended.
        self._last_stall: tuple[Hang, float] | None = None
        # When all ranks only waited, from and until: the present time, and those that are over.
        self._idle_since_s: float | None = None
        self._idle: list[tuple[float, float]] = []
        self._is_wanted = False  # a person asked, and has no report yet

    @property
    def idle(self) -> tuple[tuple[float, float], ...]:
        """Return when all ranks only waited, from and until, in seconds since the epoch."""
        present = [] if self._idle_since_s is None else [(self._idle_since_s, float("inf"))]
        since_s = time.time() - time.monotonic()
        return tuple((since_s + at, since_s + until) for at, until in [*self._idle, *present])

    @property
    def stall(self) -> Hang | None:
        """Return the rank that others waited for when the attempt ended, or shortly before."""
        if self._last_stall is None:
            return None
        found, over_at_s = self._last_stall
        return found if time.monotonic() < over_at_s + _ECHO_S else None

    @property
    def is_silent(self) -> bool:
        """Return whether the job's silence is longer than the time between two looks."""
        return self._silence.lasts_s(time.monotonic()) > 1.5 * self._every_s

    def asked(self) -> bool:
        """A person asks where the ranks are: a report follows, however busy the job is."""
        self._is_wanted = True
        return True

    def look(self) -> float:
        """Look at the job; return the seconds until the next look."""
        now = self._now(time.monotonic())
        if now is None:
            return self._every_s
        return _STEPS[self.state](self, now)

    def _watch(self, now: Look) -> float:
        if self._silence.is_near(now):
            # These signs of work cost more.
            pids = work_signs.everyone(one.pid for one in now.ranks)
            moves = self._last_traffic.is_more(now.at_s, pids)
            if self._gpu_use.are_used(now.at_s) or moves:
                self._silence.note_busy(now.at_s)
        receipts = self._job.receipts, self._job.number, rank_files.RECEIPTS
        # Without a rank that is seen, those that wrote may be of something that is long over.
        for file in rank_files.of_last_restart(*receipts) if now.ranks[0].rank is not None else ():
            if file.rank is not None and not work_signs.cpu_ticks(file.pid):
                self._silence.started(file.rank, file.pid)
        began = self._silence.take(now, self._every_s)
        if self._is_wanted:
            began = self._silence.with_ended(now)
        if not self._silence.is_stalled:
            self._end_stall(now.at_s)
        stall = self._stall_to_ask(now) if began is None else None
        if began is None and stall is None:
            return self._silence.look_again_s(now.at_s, self._every_s)
        self._question = self._ask(began or stall or now, now, is_stall=began is None)
        self.state = STACKS
        return _AGAIN_S

    def _await_stacks(self, now: Look) -> float:
        assert self._question is not None
        if not self._question.has_stacks(now):
            return _AGAIN_S
        self._question.ask_py_spy(now.at_s)
        self.state = REST
        return self._await_rest(now)

    def _await_rest(self, now: Look) -> float:
        assert self._question is not None
        if not self._question.has_rest(now.at_s):
            return _AGAIN_S
        self.state = WATCHING
        self._report(self._question, now)
        self._silence.answered(now)
        return self._every_s

    def _stall_to_ask(self, now: Look) -> Look | None:
        """Return the look with which a stall began, if its ranks must be asked now."""
        if began := self._silence.stalls(now):
            self._loud_s = self._job.longest.loud_s()
            self._gone_s = silence.GONE_S if self._ends and self._gpus else float("inf")
            return began
        return self._silence.still_stalls(now, min(self._loud_s, self._gone_s))

    def _end_stall(self, at_s: float) -> None:
        self._loud_s = self._gone_s = float("inf")
        if self._idle_since_s is not None:
            self._idle.append((self._idle_since_s, at_s))
            self._idle_since_s = None
        if self._stall is not None and self._last_stall is not None:
            if not self._silence.has_slept:  # otherwise its length is unknown
                self._job.longest.waited_at |= self._stall.functions
                if not self._stall.works:
                    waited_s = at_s - self._stall.since_s
                    self._job.longest.wait_s = max(self._job.longest.wait_s, waited_s)
            self._stall, self._last_stall = None, (self._last_stall[0], at_s)
            self._job.record.stall("")

    def _now(self, at_s: float) -> Look | None:
        """Look at the job. New processes are searched for only if they may matter."""
        matters = self.state != WATCHING or self._is_wanted or self._silence.is_quiet(at_s)
        if matters or at_s >= self._tree_until_s:
            self._tree, self._tree_until_s = work_signs.tree(), at_s + _TREE_S
        now = self._job.look(at_s, self._tree)
        ranks = [one.pid for one in now.ranks] if now else []
        self._looks += 1
        if ranks != self._ranks or self._looks < _FIRST:
            self._ranks, self._tree_until_s = ranks, at_s
        return now

    def _ask(self, began: Look, now: Look, *, is_stall: bool) -> Question:
        # An answer with the stacks of C++ takes a rank seconds of a core, which are no work.
        used = work_signs.used(self._stall.odd) if self._stall else None
        flight = FlightDumps(now.ranks, now.at_s)
        ras = RasQuery(began.ranks, now.at_s, is_wanted=bool(self._gpus))
        files = self._ask_ranks(now)
        environ = self._job.environ
        return Question(began, now, files, flight, ras, environ, used=used, is_stall=is_stall)

    def _ask_ranks(self, now: Look) -> dict[int, tuple[str, int]]:
        """Ask the ranks for their stacks; return each rank's file, and the file's size before.

        A rank without the handler would die of the signal, so it is not asked.
        """
        files: dict[int, tuple[str, int]] = {}
        names = os.listdir(self._job.receipts) if self._job.receipts else []
        for one in now.ranks:
            ending = f"-pid{one.pid}{contract.STACKS}"
            for name in (name for name in names if name.endswith(ending)):
                path = os.path.join(self._job.receipts or "", name)
                if process_tree.catches(one.pid, contract.STACKS_SIGNAL):
                    files[one.pid] = path, os.path.getsize(path)
                    os.kill(one.pid, contract.STACKS_SIGNAL)
        return files

    def _report(self, asked: Question, now: Look) -> None:
        found = _found(asked)
        if asked.is_stall:
            self._report_stall(found, asked, now)
        else:
            self._report_hang(found, asked, now)

    def _report_hang(self, found: _Found, asked: Question, now: Look) -> None:
        wanted, self._is_wanted = self._is_wanted, False
        silent_s = now.at_s - asked.since.at_s
        lines = silence_report.report(found.places, "" if wanted else seconds(silent_s), found.told)
        ras = [f"  NCCL's RAS: {found.by_ras.line}"] if found.by_ras else []
        self._job.say("\n".join([*lines, *ras]))
        if self._ends and not wanted:
            self.cause = found.cause()
            self._idle_since_s = asked.since.at_s
        path = self._job.record.hang(found.places, round(silent_s, 1), found.native, asked=wanted)
        if path:
            self._job.say(f"  all stacks, those of C++ too: {path}")

    def _report_stall(self, found: _Found, asked: Question, now: Look) -> None:
        """Note who waits for whom; report it on stderr if it lasts for longer than ever.

        A rank that works is reported only if others have waited for a rank in the same function
        before: the first evaluation of a healthy job may take an hour.
        """
        silent_s = asked.before.at_s - asked.since.at_s
        if found.wait:
            self._idle_since_s = asked.since.at_s
        if self._ends and silent_s >= silence.GONE_S and found.gone:
            self._report_hang(found, asked, now)
            return
        if silent_s >= self._gone_s:
            self._gone_s = silent_s + silence.GONE_S  # RAS may take longer to notice a lost process
        line = found.waiting(seconds(now.at_s - asked.since.at_s))
        odd = tuple(place.pid for place in found.places if place.odd)
        is_same = self._stall is not None and self._stall.odd == odd
        if line and not is_same:
            self._job.record.stall(line, now.at_s - asked.since.at_s, found.places)
            self._last_stall = found.stalled(line), float("inf")
            used = work_signs.used(odd)
            functions = places.functions(found.places)
            self._stall = _Stall(odd, now, used, functions, asked.since.at_s)
            self._traffic.is_more(now.at_s, work_signs.everyone(odd))
        if silent_s < self._loud_s:
            return
        is_known = bool(self._job.longest.waited_at & places.functions(found.places))
        never_s = self._job.longest.loud_s(works=True) if is_known else float("inf")
        self._loud_s = min(2 * silent_s, never_s if silent_s < never_s else float("inf"))
        if line and is_same and (silent_s >= never_s or not self._works(found, asked)):
            self._job.say(f"{line}{self._key()}")
            self._idle_since_s = asked.since.at_s
            self._loud_s = float("inf")

    def _key(self) -> str:
        """Return the key that shows more, as a clause; "" where the job itself would get it."""
        is_ours = self._job.plan.settings.launcher == "torchrun"
        is_ours = is_ours and not self._job.plan.options.no_python
        return "; Ctrl-\\ (SIGQUIT) shows where all ranks are" if is_ours else ""

    def _works(self, found: _Found, asked: Question) -> bool:
        """Return whether the awaited ranks worked from when the stall was noted to the question."""
        assert self._stall is not None
        assert asked.used is not None, "it was noted before"
        now = asked.before
        if not self._stall.odd:  # it is on another machine, so its work is unknown
            return not (found.by_ras and found.by_ras.gone)
        moves = self._traffic.is_more(now.at_s, work_signs.everyone(self._stall.odd))
        used = asked.used._replace(cpu_s=asked.used.cpu_s - self._stall.used.cpu_s)
        works = places.works(found.places, self._stall.noted, now, used) or moves
        self._stall = replace(self._stall, works=works)
        return works


# What a look does in each state.
_STEPS = {WATCHING: HangWatch._watch, STACKS: HangWatch._await_stacks, REST: HangWatch._await_rest}


def _found(asked: Question) -> _Found:
    """Return the result of all answers."""
    native = asked.native.take() if asked.native else {}
    written = {pid: text for pid, file in asked.files.items() if (text := _tail(*file))}
    by_py_spy = {pid: places.from_py_spy(text) for pid, text in native.items()}
    by_ras = asked.ras.finding()

    def found_with(behind: tuple[int, ...]) -> list[Place]:
        at_gpu = [pid for pid, text in native.items() if places.waits_for_gpu(text)]
        stacks = {**by_py_spy, **written}
        return places.places(asked.since, asked.before, stacks, asked.helpers, behind, at_gpu)

    found = found_with(())
    # If a rank's own stack shows that it waits, its missing record does not make it the awaited
    # one.
    unlike = asked.flight.asked - {place.rank for place in found if places.waits(place)}
    finding = flight_record.compare(asked.flight.take(), unlike)
    if finding and finding.ranks:
        found = found_with(finding.ranks)
    elif by_ras and not any(place.odd for place in found):
        found = found_with(by_ras.ranks)  # this overrides no other sign
    stopped = {one.rank for one in asked.before.ranks if one.state in places.STOPPED}
    return _Found(found, native, finding, by_ras, frozenset(stopped))


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _tail(path: str, before: int) -> str:
    """Return what was appended to a file."""
    return files.read(path, _STACK_BYTES, before).decode("utf-8", "replace")
