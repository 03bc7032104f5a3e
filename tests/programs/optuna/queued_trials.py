"""Trials, the first two from the queue, of which some end their process.

    queued_trials.py BAD SIGNAL TRIALS

BAD is an expression of `trial` and `x`.
"""

import os
import signal
import sys

import optuna

bad, number, trials = sys.argv[1], signal.Signals[sys.argv[2]], int(sys.argv[3])
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
study.enqueue_trial({"x": 0.25})
study.enqueue_trial({"x": 0.5})


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 0, 1)
    if eval(bad):
        os.kill(os.getpid(), number)
    return x


study.optimize(objective, n_trials=trials)
