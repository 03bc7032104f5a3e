"""Mark the trials that an ended run left unfinished as failed.

The loop (supervise/left_trials.py) starts this with the job's own Python and environment after a
run has ended in the middle of a trial. If there is a next process, that process does this at its
start.
"""

from __future__ import annotations

import os
import sys

import optuna  # first: its hook imports the modules below

from ... import contract, hook_runner
from . import account, storage
from .state import State


def main() -> None:
    """Mark the run's unfinished trials as failed; argv has the last attempt's exit status."""
    here = hook_runner.current(os.environ[contract.VARIABLE])
    if here is None or here.state is None:
        return
    here.previous = int(sys.argv[1])
    state = State(here.state, here)
    for name in state.studies():
        _sweep(state, account.Notes(state.lines(name)))


def _sweep(state: State, notes: account.Notes) -> None:
    place = notes.head.get("storage")
    if place is None or storage.is_gone(place):
        return
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    name = notes.head["study"]
    study = optuna.load_study(study_name=name, storage=storage.opened(place))
    how = account.ending(state.previous)
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "RUNNING" and (note := notes.noted(trial)):
            account.fail(study, trial._trial_id, f"its process ended ({how})")
            record = account.recorded(study, trial, how, "FAIL")
            state.record({**record, "attempt": note["attempt"]})
