"""The head of searches with a torch whose CUDA notes what is asked of it.

`poison(text)` is a kernel that asserts: the next question to the context raises the text.
"""

import gc
import json
import sys
import types

calls = []
first_error = []
free = [40 << 30]  # bytes of the GPU
cached = [0]  # bytes that torch keeps of what was let go


class OutOfMemoryError(RuntimeError):
    pass


class AcceleratorError(RuntimeError):
    pass


def call(name):
    def called(*_):
        calls.append(name)
        if first_error and name != "empty":
            raise AcceleratorError(first_error[0])

    return called


def poison(text="CUDA error: device-side assert triggered"):
    first_error.append(text)


OutOfMemoryError.__module__ = AcceleratorError.__module__ = "torch"
cuda = types.SimpleNamespace(
    is_initialized=lambda: True,
    empty_cache=call("empty"),
    synchronize=call("sync"),
    mem_get_info=lambda: (free[0], 80 << 30),
    memory_allocated=lambda: 1 << 30,
    memory_reserved=lambda: (1 << 30) + cached[0],
)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

import optuna  # noqa: E402 - it finds that torch

collect = gc.collect
gc.collect = lambda *a: (calls.append("gc"), collect(*a))[1]
optuna.logging.set_verbosity(optuna.logging.ERROR)


def show(study):
    print(json.dumps([[t.state.name, t.user_attrs] for t in study.trials]))
