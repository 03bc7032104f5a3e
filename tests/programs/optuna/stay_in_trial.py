"""Trial 1 of the study in STORAGE (`sqlite` or `journal`) never ends."""

import sys
import time

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1:
        print("here", flush=True)
        time.sleep(600)
    return x


if sys.argv[1] == "sqlite":
    storage = "sqlite:///study.db"
else:
    storage = JournalStorage(JournalFileBackend("study.log"))
study = optuna.create_study(study_name="s", storage=storage)
study.optimize(objective, n_trials=3)
