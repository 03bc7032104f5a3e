"""Empty the GPU allocator's cache between trials, if the profile asks for that.

Targets: `optuna.study.study.Study.optimize`, which gets one more callback (Optuna 4.5 to 5.0), and
`torch.cuda.memory.empty_cache`, which marks the end of a trial in a search without Optuna.
Reason: trials of different shapes leave fragmented memory that the next trial cannot use
(https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management). Memory in reference cycles
is free only after a garbage collection, so the cache is emptied before and after one.
Delete when Optuna offers it (`gc_after_trial` collects and empties nothing).
"""

from __future__ import annotations

import atexit
import gc
import inspect
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import contract, hidden_frames
from ..context import Context

_HOOK = "memory"


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Add the callback to each `Study.optimize`, or replace torch's own function.

    Args:
        name: "optuna.study.study", or "torch.cuda.memory".
        module: that module.
        context: the process's context.
    """
    if not context.hooks.memory.clear_between_trials:
        if name == "optuna.study.study":
            context.receipt(_HOOK, contract.OFF)
        return
    if name == "torch.cuda.memory":
        _hold_call(module, context)
        return

    signature = inspect.signature(module.Study.optimize)

    @hidden_frames.replace(module.Study, "optimize", hidden_frames.hide_all)
    def optimize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        clear = [lambda study, trial: clear_cache(context)]
        return original(**{**arguments, "callbacks": [*(arguments.get("callbacks") or ()), *clear]})

    context.receipt(_HOOK, contract.APPLIED)


def clear_cache(context: Context | None = None) -> None:
    """Empty torch's CUDA cache before and after a garbage collection, if CUDA is in use.

    This never raises, although each of these calls fails after a sticky error.

    Args:
        context: gets a receipt with the bytes freed; None for no receipt.
    """
    try:
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            empty = cuda.empty_cache
            while hasattr(empty, "__wrapped__"):
                empty = empty.__wrapped__
            before = _reserved(cuda)
            empty()
            _empty_again(empty, before, context)
    except Exception:
        return


def _hold_call(module: ModuleType, context: Context) -> None:
    """Make the script's own `torch.cuda.empty_cache` collect garbage and empty the cache again.

    A script that calls it often spends at most a hundredth of its time on that.
    """
    next_s = 0.0  # time.monotonic() from which a call again clears twice

    @hidden_frames.replace(module, "empty_cache")
    def empty_cache(original: Callable[[], None]) -> None:
        nonlocal next_s
        cuda = sys.modules["torch"].cuda
        start = time.monotonic()
        before = _reserved(cuda)
        original()
        if start >= next_s and cuda.is_initialized():
            context.guard(_HOOK, _empty_again, original, before, context)
            next_s = start + 100 * (time.monotonic() - start)


def _empty_again(empty: Callable[[], None], before: int, context: Context | None) -> None:
    gc.collect()
    empty()
    if context is None:
        return
    freed = max(0, before - _reserved(sys.modules["torch"].cuda))
    _freed.append(freed)
    count = len(_freed)
    if count & (count - 1) == 0:  # 1, 2, 4, …: a long search writes few lines
        _tell(context)
        if count == 1:
            atexit.register(_tell, context)


_freed: list[int] = []  # bytes freed by each clearing


def _tell(context: Context) -> None:
    freed = [size >> 20 for size in (sum(_freed), _freed[-1], max(_freed))]
    facts = dict(zip(("freed_mib", "last_mib", "most_mib"), freed))
    context.receipt(_HOOK, contract.OBSERVED, clears=len(_freed), **facts)


def _reserved(cuda: Any) -> int:
    """Return the bytes of the current device that torch holds, used or not; 0 if unknown."""
    try:
        return int(cuda.memory_reserved())
    except Exception:
        return 0
