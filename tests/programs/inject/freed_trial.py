"""Run out of memory in a trial, and print whether its data is gone when the cache is cleared."""

import weakref

from optuna_without_gpu import OutOfMemoryError, cuda, optuna


class Tensor:
    pass


kept = []
cuda.empty_cache = lambda: print(kept[0]() is None)


def objective(trial):
    tensor = Tensor()
    kept.append(weakref.ref(tensor))
    raise OutOfMemoryError("CUDA out of memory")


optuna.create_study().optimize(objective, n_trials=1)
