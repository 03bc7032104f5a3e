"""Two threads meet a CUDA error at once; with the argument `catch` the study catches errors."""

import sys
import threading

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
together = threading.Barrier(2, timeout=60)


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number < 2:
        together.wait()
        raise RuntimeError("CUDA error: device-side assert triggered")
    return x


catch = (Exception,) if sys.argv[1:] == ["catch"] else ()
study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
study.optimize(objective, n_trials=6, n_jobs=2, catch=catch)
print(len(study.trials))
