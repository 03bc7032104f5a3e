"""The head of searches with a torch whose CUDA notes what is asked of it."""

import gc
import json
import sys
import types

calls = []


class OutOfMemoryError(RuntimeError):
    pass


class AcceleratorError(RuntimeError):
    pass


def call(name):
    return lambda: calls.append(name)


OutOfMemoryError.__module__ = AcceleratorError.__module__ = "torch"
cuda = types.SimpleNamespace(
    is_initialized=lambda: True, empty_cache=call("empty"), synchronize=call("sync")
)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

import optuna  # noqa: E402 - it finds that torch

collect = gc.collect
gc.collect = lambda *a: (calls.append("gc"), collect(*a))[1]
optuna.logging.set_verbosity(optuna.logging.ERROR)


def show(study):
    print(json.dumps([[t.state.name, t.user_attrs] for t in study.trials]))
