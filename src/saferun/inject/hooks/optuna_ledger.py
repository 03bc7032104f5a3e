"""Where one call on a study stands, over all processes of a run: what is done, and what is running.

Before a trial is created its start time is noted, so that the next process finds the trial in the
storage even where this one is killed in the middle of creating it. Once the storage has a trial's
result, the count and the sampler's random numbers are kept. Two files a trial, 0.3 ms together.
"""

from __future__ import annotations

import signal
import threading
import time

from . import optuna_sampler as sampler
from . import optuna_state, optuna_storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .optuna_state import State

CAUSE = "saferun_cause"  # user attribute of a trial whose process ended
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")  # a trial's own doing, most likely
_CRASHED_TWICE = 2
_DEATHS = 5  # of whatever kind, of the same trial
ROW = 10  # processes in a row that end in a trial: it is not the trials' parameters
# SQLite has waited 5 s by itself, each time; doubled, so that many workers come apart.
_LOCKED_TRIES, _LOCKED_WAIT_S = 5, 0.2


class Ledger:
    """One call's account; made by `begin`.

    Args:
        state: the files.
        study: the study.
        call: which of the script's calls on it.
        draws: trials come one after the other, so that random numbers can be repeated.
    """

    def __init__(self, state: State, study: Any, call: str, *, draws: bool) -> None:
        self._state = state
        self._study = study
        self._name = optuna_state.file_name(study.study_name, call)
        self._notes_name = optuna_state.file_name(study.study_name, call + "-running")
        self._draws = draws
        self._keeps_microseconds = not optuna_storage.is_mysql(study._storage)
        self._generators: dict[str, Any] = {}
        self._notes: dict[int, dict[str, Any]] = {}  # by id of the trial, or of its template
        self._lock = threading.RLock()
        self.entry: dict[str, Any] = {
            "study": study.study_name,
            "call": call,
            "storage": optuna_storage.place_of(study._storage),
            "began": time.monotonic(),
            "done": 0,
            "last": None,  # id of the trial that was accounted for last
            "deaths": [],  # [trial, how its process ended] of those that are tried again
            "row": 0,
            "queued": [],  # ids of trials that are tried again, as they were put into the queue
            "again": [],  # ids of trials that failed with their process and are not counted
            "closed": False,
            "random": {},
        }

    def begin(self, say: Callable[[str], None]) -> str:
        """Go on where the process before this one ended, or begin.

        Args:
            say: takes a line for people.

        Returns:
            Why the call cannot be replaced; "" where it can.
        """
        old = self._state.read(self._name)
        lost = self._resume(old) if old else ""
        if lost:
            say(lost)
        if self._draws:
            self._generators = sampler.generators(self._study.sampler)
            self.entry["random"] = sampler.states(self._generators)
        self._state.write(self._name, self.entry)
        self._state.write(self._notes_name, {})
        return lost

    # --- from the storage ------------------------------------------------------------------------

    def creating(self) -> Any:
        """Return the template of a new trial, with the start time by which it can be found."""
        import optuna

        template: Any = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
        self._note(id(template), {"start": template.datetime_start.isoformat()})
        return template

    def created(self, template: Any, trial_id: int) -> None:
        """Note the id of the trial that a template led to: MySQL keeps whole seconds only."""
        with self._lock:
            note = self._notes.pop(id(template), {})
            self._notes[trial_id] = {**note, "id": trial_id}
            if not self._keeps_microseconds:
                self._write_notes()

    def taking(self, trial_id: int) -> None:
        """Note a trial before it is taken out of the queue."""
        self._note(trial_id, {"id": trial_id})

    def left(self, trial_id: int) -> None:
        """Forget a trial that this process has not taken out of the queue."""
        with self._lock:
            self._notes.pop(trial_id, None)
            self._write_notes()

    def finished(self, trial_id: int, trial: dict[str, Any], *, counts: bool) -> None:
        """Account for a trial whose result the storage has.

        Args:
            trial_id: its id.
            trial: what the record says of it.
            counts: it is one of `n_trials`; otherwise the next process tries it again.
        """
        with self._lock:
            note = self._notes.pop(trial_id, {})
            self.entry.update(last=trial_id, last_start=note.get("start"))
            if counts:
                self._done(trial["params"])
                self.entry["random"] = sampler.states(self._generators)
            else:
                self.entry["again"].append(trial_id)
                self.entry["deaths"].append([_identity(trial["params"]), trial["cause"]])
            self.save()
            if not self._draws:
                self._write_notes()
            if counts:
                self._state.progress()
            self._state.record(trial)

    def save(self) -> None:
        """Write the account."""
        self._state.write(self._name, self.entry)

    def _note(self, key: int, note: dict[str, Any]) -> None:
        with self._lock:
            self._notes[key] = note
            self._write_notes()

    def _write_notes(self) -> None:
        self._state.write(self._notes_name, {"running": list(self._notes.values())})

    # --- the process before this one -------------------------------------------------------------

    def _resume(self, old: dict[str, Any]) -> str:
        trials = self._study.get_trials(deepcopy=False)
        by_id = {trial._trial_id: trial for trial in trials}
        if old["done"] > len(trials) or (old["last"] is not None and old["last"] not in by_id):
            return (
                f"the study {old['study']!r} lacks trials that this run has made: its storage was "
                "deleted or replaced; it begins anew, and its process is not replaced"
            )
        self.entry.update(old)
        if self._draws:
            sampler.restore(self._study.sampler, old["random"])
        notes = self._state.read(self._notes_name).get("running", [])
        begun = [trial for trial in noted(trials, notes) if trial._trial_id != old["last"]]
        for trial in begun:
            if trial.state.is_finished():
                self._count(trial, trials)
        dead = [trial for trial in begun if trial.state.name == "RUNNING"]
        if dead:
            self._bury(dead, trials)
        for trial_id in self.entry["again"]:
            if trial_id in by_id:
                self._requeue(by_id[trial_id])
        self.entry["again"] = []
        return ""

    def _count(self, trial: Any, trials: list[Any]) -> None:
        """Count a trial that was committed just before its process ended."""
        self._done(optuna_state.shown(trial.params))
        self.entry["last"] = trial._trial_id
        if self._draws:
            sampler.advance(self._study, trials, trial)
        self._state.progress()
        self._state.record(recorded(self._study, trial, "unknown"))

    def _bury(self, dead: list[Any], trials: list[Any]) -> None:
        """Mark the trials in which the process before this one ended; give up on a bad one."""
        how = ending(self._state.previous)
        hopeless = len(dead) == 1 and self._is_hopeless(dead[0], how)
        for trial in dead:
            fail(self._study, trial._trial_id, f"its process ended ({how})")
            self._state.record(recorded(self._study, trial, how, "FAIL"))
            self.entry["deaths"].append([_identity(optuna_state.shown(trial.params)), how])
            if not hopeless and not self._told(trial, trials):
                self._requeue(trial)
        if hopeless:
            self._done(optuna_state.shown(dead[0].params))
            if self._draws:
                sampler.advance(self._study, trials, dead[0])
        self.entry["row"] += 1
        if self.entry["row"] < ROW:
            self._state.progress()

    def _done(self, params: dict[str, Any]) -> None:
        """Count a trial, and forget its deaths; those without parameters could be anybody's."""
        over = (_identity(params), _identity({}))
        deaths = [one for one in self.entry["deaths"] if one[0] not in over]
        self.entry.update(done=self.entry["done"] + 1, deaths=deaths)

    def _is_hopeless(self, trial: Any, how: str) -> bool:
        """Return whether a trial has ended its process so often that it is not tried again."""
        own = _identity(optuna_state.shown(trial.params))
        deaths = [one for identity, one in self.entry["deaths"] if identity == own]
        twice = how in _CRASHES and deaths.count(how) + 1 >= _CRASHED_TWICE
        return twice or len(deaths) + 1 >= _DEATHS

    def _told(self, trial: Any, trials: list[Any]) -> bool:
        """Call the script's own callback for such a trial, if it has one; it decides what is next.

        Optuna itself would call it only once the trial's heartbeat has been missed for long enough.
        """
        import copy

        storage = self._study._storage
        callback = optuna_storage.heartbeat_callback(storage)
        if callback is None:
            return False
        failed = copy.deepcopy(storage.get_trial(trial._trial_id))
        failed.user_attrs.pop(CAUSE, None)
        patiently(lambda: callback(self._study, failed))
        if self._draws and "failed_trial" not in trial.system_attrs:  # or nothing was drawn for it
            sampler.advance(self._study, trials, trial)
        return True

    def _requeue(self, trial: Any) -> None:
        """Put a trial back into the queue where its sampler would not come to it again."""
        import optuna

        queued = "fixed_params" in trial.system_attrs
        if not queued and not (trial.params and sampler.remembers(self._study.sampler)):
            return
        own = {key: value for key, value in trial.user_attrs.items() if key != CAUSE}
        again = optuna.trial.create_trial(
            state=optuna.trial.TrialState.WAITING,
            params={} if queued else trial.params,
            distributions={} if queued else trial.distributions,
            user_attrs=own,
            system_attrs=trial.system_attrs,
        )
        storage = self._study._storage
        made = patiently(lambda: storage.create_new_trial(self._study._study_id, again))
        self.entry["queued"].append(made)

    def is_any_queued(self) -> bool:
        """Return whether a trial that is tried again has not been taken out of the queue yet."""
        import optuna

        if not self.entry["queued"]:
            return False
        waiting = (optuna.trial.TrialState.WAITING,)
        left = self._study.get_trials(deepcopy=False, states=waiting)
        return any(trial._trial_id in self.entry["queued"] for trial in left)


def fail(study: Any, trial_id: int, cause: str) -> None:
    """Mark a trial that nobody runs any more as failed, with its cause as an attribute.

    Args:
        study: an optuna.Study.
        trial_id: the storage's number of the trial.
        cause: for people.
    """
    import optuna

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
        "params": optuna_state.shown(trial.params),
        "values": trial.values,
        "seconds": (ended - trial.datetime_start).total_seconds() if ended else None,
    }


def _identity(params: dict[str, Any]) -> str:
    """Return what a trial has in common with the one that tries it again: its parameters.

    Not themselves: this is kept on disk, and must stay equal where saferun masks secrets.
    """
    import hashlib

    text = repr(sorted(params.items())).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:32]


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


def noted(trials: list[Any], notes: list[dict[str, Any]]) -> list[Any]:
    """Return the trials that notes mean: by id, or by the start time of one without an id yet."""
    ids = {note["id"] for note in notes if "id" in note}
    starts = {note["start"] for note in notes if "id" not in note}
    return [
        trial
        for trial in trials
        if trial._trial_id in ids
        or (trial.datetime_start is not None and trial.datetime_start.isoformat() in starts)
    ]


def ending(status: int | None) -> str:
    """Return how a process ended, by its exit status: SIGKILL, "status 1", "unknown"."""
    if status is None:
        return "unknown"
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"status {status}"
