"""Eight trials: those with the largest batch run out of memory, one meets a CUDA error."""

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    batch = trial.suggest_categorical("batch", [8, 16, 32])
    trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    if batch == 32:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if trial.number == 2:
        raise RuntimeError("CUDA error: device-side assert triggered")
    if trial.number == 5:
        raise optuna.TrialPruned
    return 1.0


sampler = optuna.samplers.RandomSampler(5)
study = optuna.create_study(study_name="s", storage="sqlite:///study.db", sampler=sampler)
for batch in [8, 16, 16, 32, 32, 8, 32, 16]:
    study.enqueue_trial({"batch": batch})
study.optimize(objective, n_trials=8)
