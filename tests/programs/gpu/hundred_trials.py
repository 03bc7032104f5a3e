"""A search of 100 trials; with the argument `faults` those that are else pruned fail in CUDA."""

import json
import sys

import optuna
import torch

optuna.logging.set_verbosity(optuna.logging.ERROR)
faults = sys.argv[1] == "faults"


def objective(trial):
    n = trial.suggest_int("n", 1, 12)
    x = trial.suggest_float("x", -1, 1)
    if n == 12:  # more than the GPU has
        if not faults:
            raise optuna.TrialPruned
        hold = torch.empty(1 << 30, device="cuda")  # noqa: F841 - it is held
        torch.empty(1 << 40, device="cuda")
    if n == 11:  # an index beyond the end
        if not faults:
            raise optuna.TrialPruned
        table = torch.ones(4, device="cuda")
        return table[torch.tensor([9], device="cuda")].sum().item()
    return float((torch.full((64, 64), x, device="cuda") ** 2).mean()) + n


study = optuna.create_study(
    storage=f"sqlite:///{sys.argv[1]}.db",
    study_name="s",
    sampler=optuna.samplers.RandomSampler(seed=11),
)
study.optimize(objective, n_trials=100)
print(json.dumps([[t.state.name, t.params, t.value] for t in study.trials]))
