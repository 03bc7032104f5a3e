"""Rank 0 of two has the study; in a trial, rank 1 is killed: in attempt 1, or `always`.

It stands for a script with TorchDistributedTrial: rank 0 waits for rank 1 in the trial.
"""

import os
import signal
import sys
import time

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
attempt = os.environ["SAFERUN_ATTEMPT"]
is_struck = attempt == "1" or "always" in sys.argv
mark = f"in-trial-{attempt}"


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number and is_struck:
        open(mark, "w", encoding="utf-8").close()
        signal.pause()
    return x


if os.environ["RANK"] == "0":
    sampler = optuna.samplers.RandomSampler(3)
    study = optuna.create_study(study_name="s", storage="sqlite:///study.db", sampler=sampler)
    study.optimize(objective, n_trials=2)
elif is_struck:
    while not os.path.exists(mark):
        time.sleep(0.01)  # no event tells of a file
    os.kill(os.getpid(), signal.SIGKILL)
