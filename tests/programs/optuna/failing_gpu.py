"""Trials that fail a GPU which is not there: WAYS names what the queued trials do, in order."""

import os
import pathlib
import signal

from optuna_without_gpu import cached, free, optuna, poison

HANDLE = "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"
WAYS = [
    "",
    "handle",
    "dynamo",
    "hidden",
    "late",
    "library once",
    "library",
    "memory",
    "crash",
    "cached",
]


def objective(trial):
    way = WAYS[trial.suggest_int("way", 0, len(WAYS) - 1)]
    trial.suggest_float("x", 0, 1)
    if way in ("handle", "dynamo", "hidden", "late"):
        poison("CUDA error: device-side assert triggered")
    if way == "handle":
        raise RuntimeError(HANDLE)
    if way == "dynamo":
        raise Exception("AcceleratorError: no words of the assert")
    if way == "hidden":
        raise optuna.TrialPruned
    if way == "library" or (way == "library once" and not pathlib.Path("struck").exists()):
        pathlib.Path("struck").touch()
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
    if way == "memory":
        raise RuntimeError("Triton Error [CUDA]: out of memory")
    if way == "cached" and not pathlib.Path("cached").exists():
        pathlib.Path("cached").touch()
        free[0], cached[0] = 1 << 28, 60 << 30
        raise RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, cusolverDnCreate")
    if way == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return float(trial.number)


storages = optuna.storages
study = optuna.create_study(
    storage=storages.JournalStorage(storages.journal.JournalFileBackend("study.log")),
    sampler=optuna.samplers.RandomSampler(seed=3),
)
for way in range(len(WAYS)):
    study.enqueue_trial({"way": way})
study.optimize(objective, n_trials=len(WAYS))
