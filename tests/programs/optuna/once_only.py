"""A script that says what it does only once, through a CUDA error and a SIGKILL."""

import os
import signal

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
seen = []


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    seen.append(trial.number)
    if trial.number == 3:
        raise RuntimeError("CUDA error: device-side assert triggered")
    if trial.number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def called(study, trial):
    print("after", trial.number, flush=True)


place = "sqlite:///study.db"
try:
    optuna.delete_study(study_name="s", storage=place)
except KeyError:
    print("none to delete", flush=True)
study = optuna.create_study(study_name="s", storage=place, sampler=optuna.samplers.RandomSampler(1))
for x in (0.25, 0.5):
    study.enqueue_trial({"x": x})
study.optimize(objective, n_trials=5, callbacks=[called])
study.optimize(objective, n_trials=4, callbacks=[called])
print("end", len(study.trials), seen)
