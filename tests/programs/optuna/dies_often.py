"""dies_often.py DEATHS: a search each of whose processes but the last dies in its third trial.

Under WAY=warm it does so once a process that has imported ahead waits to take its place.
"""

import os
import sys

import optuna
import successor
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.ERROR)
with open("starts", "a", encoding="utf-8") as file:
    file.write(os.environ.get("SAFERUN_START", "first") + "\n")


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 0, 1)
    if trial.number % 3 == 2 and trial.number < 3 * int(sys.argv[1]):
        successor.die(in_every_attempt=True)
    return x


study = optuna.create_study(
    study_name="s",
    storage=JournalStorage(JournalFileBackend("study.log")),
    sampler=optuna.samplers.RandomSampler(seed=7),
    load_if_exists=True,
)
study.optimize(objective, n_trials=3 * int(sys.argv[1]) + 3)
