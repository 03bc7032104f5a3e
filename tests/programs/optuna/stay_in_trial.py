"""Trial 1 of the study in STORAGE waits, the first time, for a line on stdin.

stay_in_trial.py STORAGE: `journal`, or an address.
"""

import os
import signal
import sys

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1 and not os.path.exists("waited"):
        open("waited", "x", encoding="utf-8").close()
        print("here", flush=True)
        if not sys.stdin.readline():
            signal.pause()  # nobody will write one
    return x


storage = sys.argv[1]
if storage == "journal":
    storage = JournalStorage(JournalFileBackend("study.log"))
study = optuna.create_study(study_name="s", storage=storage)
study.optimize(objective, n_trials=4)
