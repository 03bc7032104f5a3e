"""The trials of a study that are this run's; the storage knows what became of each.

Lines are appended to a file of the run, one file a study:

    {"study": NAME, "storage": PLACE}                      once; lines before it count no more
    {"call": NAME, "began": MONOTONIC SECONDS}             of `optimize`, "ask", or a rank; with
                                                           its n_trials
    {"call": NAME, "attempt": N, "start": TIME}            a trial is about to be created
    {"call": NAME, "attempt": N, "start": TIME, "id": ID}  it was created, or is about to be taken
                                                           out of the queue
    {"left": ID}                                           another process has taken it
    {"end": ID, "row": N}                                  the storage has its result; "again": 1
                                                           where the next process runs it again
    {"closed": CALL}                                       the script goes on behind this call

Before a trial is created its start time is noted, so that the next process finds it even where this
one is killed in the middle of creating it.
"""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable
from typing import Any

import optuna

from ...context import Context
from .. import cuda_failures
from . import state as files
from . import storage as storages
from .state import State

CAUSE = "saferun_cause"  # user attribute of a trial whose process ended
RETRY = "saferun_retry_of"  # system attribute of a trial that runs another one again: its number
# Processes in a row that a trial ended: it is not the trials' parameters. Fewer where no trial of
# the run has ended well yet.
_ROW_AT_FIRST, _ROW = 10, 30
# SQLite has waited 5 s by itself, each time; doubled, so that many workers come apart.
_LOCKED_TRIES, _LOCKED_WAIT_S = 5, 0.2


class Notes:
    """The content of one study's file."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        heads = [number for number, line in enumerate(lines) if "study" in line]
        lines = lines[heads[-1] :] if heads else []
        self.head = lines[0] if lines else {}
        self.began = {one["call"]: one["began"] for one in reversed(lines) if "began" in one}
        self.wanted = {one["call"]: one["n_trials"] for one in lines if one.get("n_trials")}
        self.closed = {line["closed"] for line in lines if "closed" in line}
        self.ends = {line["end"]: line for line in lines if "end" in line}
        self.row = next((line["row"] for line in reversed(lines) if "row" in line), 0)
        self._by_id: dict[int, dict[str, Any]] = {}
        for line in lines:
            if "id" in line:
                self._by_id[line["id"]] = line
            elif "left" in line:
                self._by_id.pop(line["left"], None)
        named = {line.get("start") for line in self._by_id.values()}
        self._by_start = {
            line["start"]: line for line in lines if "start" in line and line["start"] not in named
        }

    def noted(self, trial: Any) -> dict[str, Any]:
        """Return the line that a trial of the storage has; {} for one of another run."""
        start = trial.datetime_start.isoformat() if trial.datetime_start else ""
        return self._by_id.get(trial._trial_id) or self._by_start.get(start) or {}


class Account:
    """The trials of one call of `optimize`, or of a script or rank that asks for them: a watcher.

    Args:
        context: the process's.
        study: the study.
        state: the run's files; None where there are none.
        call: which of the script's calls on this study.
        is_kept: another process goes on where this one ends.
        n_trials: that the script has given; None where it gave none.
    """

    def __init__(
        self,
        context: Context,
        study: Any,
        state: State | None,
        call: str,
        *,
        is_kept: bool,
        n_trials: int | None = None,
    ) -> None:
        self.context = context
        self.study = study
        self.call = call
        self.is_kept = is_kept and state is not None
        self.state = state
        self._file = files.file_name(study.study_name)
        self._running: dict[int, float] = {}  # ids of trials; when each began
        self.began = time.monotonic()
        self.is_closed = False
        self.n_trials = n_trials  # of all processes: what the first one's script has given, or more
        self.done = 0  # trials that count as one of n_trials, in all processes
        self.good = 0  # good trials of this process
        self._is_any_good = False  # a process of this run has had a good trial
        self.row = 0  # trials in a row that made their process unusable, or ended it
        self.causes: dict[int, str] = {}  # id of a trial -> why it is pruned or fails
        self._lost: list[Any] = []  # trials of earlier processes that are run again
        self.again: set[int] = set()  # ids of trials that the next process runs again
        self.failed = "no valid value"  # the cause of a failed trial that has no other
        self.on_finished: Callable[[], None] = lambda: None

    def begin(self) -> bool:
        """Go on where the process before this one ended, or begin.

        Returns:
            Whether earlier processes of the run have made trials in this study.
        """
        assert self.state is not None
        notes = Notes(self.state.lines(self._file))
        trials = self.study.get_trials(deepcopy=False)
        made = {trial._trial_id for trial in trials}
        if any(one not in made for one in notes.ends):
            self.context.say(
                f"the study {self.study.study_name!r} lacks trials that this run has made: its "
                "storage was deleted or replaced; it begins anew, and its process is not replaced"
            )
            self._head()
            self.is_kept = False
            return False
        if not notes.head:
            self._head()
        mine = [(trial, note) for trial in trials if (note := notes.noted(trial))]
        self._resume(notes, trials, mine)
        if self.call not in notes.began:
            wanted = {} if self.n_trials is None else {"n_trials": self.n_trials}
            self.state.append(self._file, {"call": self.call, "began": self.began, **wanted})
        elif self.n_trials is not None:  # a script may have taken off what the study has by now
            self.n_trials = max(self.n_trials, notes.wanted.get(self.call, 0))
        return bool(mine)

    @property
    def is_last_in_row(self) -> bool:
        """True where one more trial that ends its process is not due to its parameters."""
        return self.row + 1 >= (_ROW if self._is_any_good else _ROW_AT_FIRST)

    def close(self) -> None:
        """Note that the script has gone on after this call, so that no later process repeats it."""
        if self.is_kept and not self.is_closed:
            self.is_closed = True
            self._kept({"closed": self.call})

    def is_any_again(self) -> bool:
        """Tell whether a trial that is run again still waits in the queue."""
        waiting = (optuna.trial.TrialState.WAITING,)
        left = self.study.get_trials(deepcopy=False, states=waiting) if self.is_kept else []
        return any(RETRY in trial.system_attrs for trial in left)

    # --- from the storage: see storage.py --------------------------------------------------------

    def create(self, make: Callable[[Any], int]) -> int:
        """Have the storage create a trial, which can be found from its start on.

        Args:
            make: the storage's own; takes a template or None, returns the id.
        """
        template, start = None, ""
        if self.is_kept:
            template = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
            start = template.datetime_start.isoformat()
            self._kept({**self._own(), "start": start})
        trial_id = make(template)
        self._running[trial_id] = time.monotonic()
        self._kept({**self._own(), "start": start, "id": trial_id})
        return trial_id

    def taking(self, trial_id: int) -> None:
        """Note a trial before it is taken out of the queue."""
        self._kept({**self._own(), "id": trial_id})

    def taken(self, trial_id: int) -> None:
        """Note that it was taken: a thread that came late may have noted the opposite."""
        self._running[trial_id] = time.monotonic()
        self._kept({**self._own(), "id": trial_id})

    def left(self, trial_id: int) -> None:
        """Forget a trial that this process has not taken out of the queue."""
        if trial_id not in self._running:
            self._kept({"left": trial_id})

    def finished(self, trial_id: int, state: Any) -> None:
        """Account for a trial whose result the storage has.

        Args:
            trial_id: its id.
            state: an optuna.trial.TrialState.
        """
        began = self._running.pop(trial_id, None)
        if began is None:  # not one that this process runs
            return
        cause, again = self.causes.pop(trial_id, ""), trial_id in self.again
        is_error = cause in cuda_failures.KINDS
        is_good = state.name in ("COMPLETE", "PRUNED") and not is_error
        self.good += is_good
        self._is_any_good |= is_good
        self.row = 0 if is_good else self.row + (is_error and cause != cuda_failures.OUT_OF_MEMORY)
        self._kept({"end": trial_id, "row": self.row, **({"again": 1} if again else {})})
        self.context.guard("optuna", self._account, trial_id, cause, time.monotonic() - began)
        self.on_finished()

    def _account(self, trial_id: int, cause: str, seconds: float) -> None:
        trial = self.study._storage.get_trial(trial_id)
        if not cause:
            cause = {"FAIL": self.failed, "PRUNED": "pruner"}.get(trial.state.name, "")
        again = self.is_kept and _is_run_again(trial, trial_id in self.again)
        counts = not again
        self.done += counts
        if self.state is not None:
            if self.is_kept and counts:
                self.state.progress()
            record = recorded(self.study, trial, cause)
            self.state.record({**record, "seconds": round(seconds, 6), "again": again})

    def _own(self) -> dict[str, Any]:
        return {"call": self.call, "attempt": self.state.attempt if self.state else 0}

    def _head(self) -> None:
        place = storages.place_of(self.study._storage)
        assert self.state is not None
        self.state.append(self._file, {"study": self.study.study_name, "storage": place})

    def _kept(self, line: dict[str, Any]) -> None:
        if self.is_kept and self.state is not None:
            self.context.guard("optuna", self.state.append, self._file, line)

    # --- the processes before this one -----------------------------------------------------------

    def _resume(self, notes: Notes, trials: list[Any], mine: list[tuple[Any, Any]]) -> None:
        """Run again, once, what processes before this one have left; count the rest."""
        self.began = notes.began.get(self.call, self.began)
        self.is_closed = self.call in notes.closed
        self.row = notes.row
        callback = storages.heartbeat_callback(self.study._storage)
        run_again = {trial.system_attrs.get(RETRY) for trial in trials}
        is_any_lost = False
        for trial, note in mine:
            end = notes.ends.get(trial._trial_id)
            is_running = trial.state.name == "RUNNING"
            is_own = note["attempt"] == (self.state and self.state.attempt)
            if trial.state.name == "WAITING" or (is_running and is_own):
                continue
            is_lost = is_running or (end is None and CAUSE in trial.user_attrs)
            again = (is_lost and not callback) or "again" in (end or {})
            if is_lost:
                is_any_lost = True
                self._mark_lost(trial, note, callback)
                line = {"end": trial._trial_id, "row": self.row + 1}
                self._kept({**line, "again": 1} if again else line)
            elif end is None:  # the storage had its result just before its process ended
                self._record(trial)
            if again and RETRY not in trial.system_attrs and trial.number not in run_again:
                self._lost.append(trial)
            self.done += note["call"] == self.call and not _is_run_again(trial, is_lost or again)
            self._is_any_good |= _is_good(trial)
        if is_any_lost:
            if self.state is not None and not self.is_last_in_row:
                self.state.progress()
            self.row += 1

    def _record(self, trial: Any) -> None:
        if self.state is not None:
            self.state.record(recorded(self.study, trial, "unknown"))
            self.state.progress()

    def _mark_lost(
        self, trial: Any, note: dict[str, Any], callback: Callable[[Any, Any], None] | None
    ) -> None:
        """Mark a trial as failed whose process has ended; call the script's own callback for it.

        Optuna itself would call it only once the trial's heartbeat has been missed for long enough.
        """
        assert self.state is not None
        how = ending(self.state.previous)
        fail(self.study, trial._trial_id, f"its process ended ({how})")
        again = RETRY not in trial.system_attrs
        record = recorded(self.study, trial, how, "FAIL")
        self.state.record({**record, "again": again, "attempt": note["attempt"]})
        if callback is not None:
            failed = copy.deepcopy(self.study._storage.get_trial(trial._trial_id))
            failed.user_attrs.pop(CAUSE, None)
            patiently(lambda: callback(self.study, failed))

    def run_again(self) -> None:
        """Put a copy of each trial that is run again into the queue, with what it had."""
        while self._lost:
            self._requeue(self._lost.pop(0))

    def _requeue(self, trial: Any) -> None:
        queued = "fixed_params" in trial.system_attrs
        copied = optuna.trial.create_trial(
            state=optuna.trial.TrialState.WAITING,
            params={} if queued else trial.params,
            distributions={} if queued else trial.distributions,
            user_attrs={key: v for key, v in trial.user_attrs.items() if key != CAUSE},
            system_attrs={**trial.system_attrs, RETRY: trial.number},
        )
        storage = self.study._storage
        patiently(lambda: storage.create_new_trial(self.study._study_id, copied))


def _is_good(trial: Any) -> bool:
    return trial.state.name in ("COMPLETE", "PRUNED") and "cuda_error" not in trial.user_attrs


def _is_run_again(trial: Any, again: bool) -> bool:
    """Tell whether a trial that failed with its process is run again, and so does not count."""
    return (again or CAUSE in trial.user_attrs) and RETRY not in trial.system_attrs


def fail(study: Any, trial_id: int, cause: str) -> None:
    """Mark a trial that nobody runs any more as failed, with its cause as an attribute.

    Args:
        study: an optuna.Study.
        trial_id: the storage's number of the trial.
        cause: for people.
    """
    storage = study._storage
    try:
        patiently(lambda: storage.set_trial_user_attr(trial_id, CAUSE, cause))
        patiently(lambda: storage.set_trial_state_values(trial_id, optuna.trial.TrialState.FAIL))
    except optuna.exceptions.UpdateFinishedTrialError:
        return  # its heartbeat had stopped, and somebody else has marked it


def recorded(study: Any, trial: Any, cause: str, state: str = "") -> dict[str, Any]:
    """Return the record of a trial of the storage.

    Args:
        study: its study.
        trial: as the storage has it.
        cause: why it was pruned or failed.
        state: its state, where the storage is about to learn it.
    """
    ended = trial.datetime_complete if trial.datetime_start else None
    return {
        "study": study.study_name,
        "number": trial.number,
        "state": state or trial.state.name,
        "cause": cause if (state or trial.state.name) != "COMPLETE" else "",
        "params": files.shown(trial.params),
        "values": trial.values,
        "direction": study.direction.name.lower() if len(study.directions) == 1 else "",
        "seconds": (ended - trial.datetime_start).total_seconds() if ended else None,
    }


def patiently(action: Callable[[], Any]) -> Any:
    """Do something in the storage; try again for three seconds where its database is locked."""
    for number in range(_LOCKED_TRIES):
        try:
            return action()
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            if number == _LOCKED_TRIES - 1 or not names & {"StorageInternalError", "OSError"}:
                raise
            time.sleep(_LOCKED_WAIT_S * 2**number)
    return None


def ending(status: int | None) -> str:
    """Return how a process ended, by its exit status: SIGKILL, "status 1", "unknown"."""
    if status is None:
        return "unknown"
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"status {status}"
