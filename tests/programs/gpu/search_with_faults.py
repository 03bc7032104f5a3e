"""A search: `DATABASE TRIALS [faulty]`. Without faults the same trials are pruned, or end well."""

import os
import signal
import sys

import optuna
import torch

optuna.logging.set_verbosity(optuna.logging.ERROR)
database, trials, faulty = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["faulty"]


def is_first(name):
    try:
        os.close(os.open(f"struck-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def objective(trial):
    x = trial.suggest_float("x", -2, 2)
    way = int((x + 2) * 1e6) % 20
    table = torch.ones(64, 1, device="cuda")
    if way == 3:  # the parameters ask for more memory than there is
        if faulty:
            torch.empty(1 << 43, dtype=torch.uint8, device="cuda")
        raise optuna.TrialPruned
    if way == 5:  # or for a token that is not in the table
        if faulty:
            torch.nn.functional.embedding(torch.tensor([70], device="cuda"), table)
            torch.cuda.synchronize()
        raise optuna.TrialPruned
    ends = {7: signal.SIGKILL, 9: signal.SIGSEGV, 11: signal.SIGTERM}
    if way in ends and faulty and is_first(x):
        os.kill(os.getpid(), ends[way])
    return ((table * x - 1) ** 2).mean().item()


study = optuna.create_study(
    storage=f"sqlite:///{database}",
    study_name="s",
    sampler=optuna.samplers.RandomSampler(seed=3),
    load_if_exists=True,
)
study.optimize(objective, n_trials=trials)
print(study.best_value, flush=True)
