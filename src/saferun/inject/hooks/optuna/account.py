"""The trials of a study that belong to this run; the storage has their results.

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

A trial's start time is written before the trial is created, so that the next process finds it even
if this one is killed during the creation.
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
# So many successive processes that a trial ended cannot be due to the trials' parameters. The limit
# is lower while no trial of the run has succeeded.
_ROW_AT_FIRST, _ROW = 10, 30
# SQLite itself waits 5 s each time; our own wait doubles, so that many workers spread out.
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
        """Return the line about a trial of the storage; {} if it is of another run."""
        start = trial.datetime_start.isoformat() if trial.datetime_start else ""
        return self._by_id.get(trial._trial_id) or self._by_start.get(start) or {}


class Account:
    """The trials of one call of `optimize`, or of a script or rank that asks for them; a Watcher.

    Args:
        context: the process's context.
        study: the study.
        state: the run's files; None if there are none.
        call: identifies the script's call on this study.
        is_kept: another process continues where this one ends.
        n_trials: the script's own value; None without one.
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
        self._running: dict[int, float] = {}  # id of a trial -> when it began
        self.began = time.monotonic()
        self.is_closed = False
        self.n_trials = n_trials  # for all processes: the value of the first one's script, or more
        self.done = 0  # trials of all processes that count towards n_trials
        self.good = 0  # good trials of this process
        self._is_any_good = False  # a process of this run has had a good trial
        self.row = 0  # successive trials that made their process unusable, or ended it
        self.causes: dict[int, str] = {}  # id of a trial -> why it is pruned or fails
        self._lost: list[Any] = []  # trials of earlier processes that are run again
        self.again: set[int] = set()  # ids of trials that the next process runs again
        self.failed = "no valid value"  # the cause of a failed trial without another cause
        self.on_finished: Callable[[], None] = lambda: None

    def begin(self) -> bool:
        """Continue where the previous process ended, or begin.

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
        elif self.n_trials is not None:  # a script may subtract the study's present trials
            self.n_trials = max(self.n_trials, notes.wanted.get(self.call, 0))
        return bool(mine)

    @property
    def is_last_in_row(self) -> bool:
        """Return whether one more trial that ends its process cannot be due to its parameters."""
        return self.row + 1 >= (_ROW if self._is_any_good else _ROW_AT_FIRST)

    def close(self) -> None:
        """Note that the script continued after this call, so that no later process repeats it."""
        if self.is_kept and not self.is_closed:
            self.is_closed = True
            self._kept({"closed": self.call})

    def is_any_again(self) -> bool:
        """Return whether a trial that is run again still waits in the queue."""
        waiting = (optuna.trial.TrialState.WAITING,)
        left = self.study.get_trials(deepcopy=False, states=waiting) if self.is_kept else []
        return any(RETRY in trial.system_attrs for trial in left)

    # --- from the storage: see storage.py --------------------------------------------------------

    def create(self, make: Callable[[Any], int]) -> int:
        """Let the storage create a trial, which can be found from its start on.

        Args:
            make: the storage's own method; takes a template or None, returns the id.
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
        """Note that a trial was taken: a thread that came late may have noted the opposite."""
        self._running[trial_id] = time.monotonic()
        self._kept({**self._own(), "id": trial_id})

    def left(self, trial_id: int) -> None:
        """Forget a trial that this process did not take out of the queue."""
        if trial_id not in self._running:
            self._kept({"left": trial_id})

    def finished(self, trial_id: int, state: Any) -> None:
        """Account for a trial whose result is in the storage.

        Args:
            trial_id: the trial's id.
            state: its optuna.trial.TrialState.
        """
        began = self._running.pop(trial_id, None)
        if began is None:  # this process does not run it
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
        """Run the trials again, once, that earlier processes left; count the others."""
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
            elif end is None:  # the storage got its result just before its process ended
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
        """Mark a trial whose process has ended as failed; call the script's callback for it.

        Optuna itself would call it only after the trial's heartbeat has been missing for long
        enough.
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
        """Put a copy of each trial that is run again into the queue, with its parameters."""
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
    """Return whether a trial that failed with its process is run again, and so does not count."""
    return (again or CAUSE in trial.user_attrs) and RETRY not in trial.system_attrs


def fail(study: Any, trial_id: int, cause: str) -> None:
    """Mark a trial that no process runs any more as failed, with its cause as an attribute.

    Args:
        study: an optuna.Study.
        trial_id: the trial's id in the storage.
        cause: the cause, for people.
    """
    storage = study._storage
    try:
        patiently(lambda: storage.set_trial_user_attr(trial_id, CAUSE, cause))
        patiently(lambda: storage.set_trial_state_values(trial_id, optuna.trial.TrialState.FAIL))
    except optuna.exceptions.UpdateFinishedTrialError:
        return  # its heartbeat had stopped, and another process has marked it


def recorded(study: Any, trial: Any, cause: str, state: str = "") -> dict[str, Any]:
    """Return the record of a trial in the storage.

    Args:
        study: the trial's study.
        trial: the trial as stored.
        cause: why the trial was pruned or failed.
        state: the trial's state, if it is not yet stored.
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
    """Do an action in the storage; retry for three seconds if its database is locked."""
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
    """Return how a process ended, from its exit status: SIGKILL, "status 1", "unknown"."""
    if status is None:
        return "unknown"
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"status {status}"
