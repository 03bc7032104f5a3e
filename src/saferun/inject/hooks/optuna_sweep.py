"""Fail the trials that a run has left behind: nobody runs them any more.

Started by the loop (supervise/left_trials.py) with the job's own Python and environment, once a run
has ended in the middle of a trial. Where there is a next process, that one does this at its start.
"""

from __future__ import annotations

import os
import sys

from .. import contract
from . import optuna_ledger, optuna_state, optuna_storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Fail what the notes in the state directory name; argument: the last attempt's exit status."""
    from .. import context

    here = context.current(os.environ[contract.VARIABLE])
    if here is None or here.state is None:
        return
    here.previous = int(sys.argv[1])
    state = optuna_state.State(here.state, here)
    for name in sorted(os.listdir(here.state)):
        if name.startswith("optuna-") and name.endswith("-running.json"):
            _sweep(state, state.read(name), state.read(name.replace("-running.json", ".json")))


def _sweep(state: optuna_state.State, notes: dict[str, Any], entry: dict[str, Any]) -> None:
    import optuna

    place = entry.get("storage")
    if not notes.get("running") or place is None or optuna_storage.is_gone(place):
        return
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    study = optuna.load_study(study_name=entry["study"], storage=optuna_storage.opened(place))
    how = optuna_ledger.ending(state.previous)
    for trial in optuna_ledger.noted(study.get_trials(deepcopy=False), notes["running"]):
        if trial.state.name == "RUNNING":
            optuna_ledger.fail(study, trial._trial_id, f"its process ended ({how})")
            state.record(optuna_ledger.recorded(study, trial, how, "FAIL"))
