"""Trials 2 and 3 are killed; a callback of the storage tries a trial without heartbeat again."""

import os
import signal

import optuna
from optuna.storages import RDBStorage

optuna.logging.set_verbosity(optuna.logging.ERROR)
if hasattr(RDBStorage, "get_heartbeat_stale_trial_callback"):  # Optuna 4.9 and later
    retry = optuna.storages.RetryHeartbeatStaleTrialCallback
    options = {"heartbeat_stale_trial_callback": retry()}
else:
    retry = optuna.storages.RetryFailedTrialCallback
    options = {"failed_trial_callback": retry()}


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    print(trial.number, retry.retried_trial_number(study.trials[trial.number]), flush=True)
    if trial.number in (2, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


storage = RDBStorage("sqlite:///study.db", heartbeat_interval=60, **options)
sampler = optuna.samplers.RandomSampler(3)
study = optuna.create_study(study_name="s", storage=storage, sampler=sampler)
study.enqueue_trial({"x": 0.5})
study.optimize(objective, n_trials=4)
