"""Trial 1 of the study in the database ADDRESS waits, the first time, for a line on stdin.

wait_in_trial.py ADDRESS
"""

import os
import sys

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1 and not os.path.exists("waited"):
        open("waited", "x").close()
        print("here", flush=True)
        sys.stdin.readline()
    return x


study = optuna.create_study(study_name="s", storage=sys.argv[1])
study.optimize(objective, n_trials=4)
