"""Empty the GPU allocator's cache between trials, where the profile says so.

Target: `optuna.study.study.Study.optimize`, which gets one more callback; Optuna 4.5 to 5.0.
Reason: trials of different shapes leave memory in pieces that the next trial cannot use
(https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management). What a trial left in
reference cycles is only free after a garbage collection, so the cache is emptied before and after.
Delete when Optuna offers it (`gc_after_trial` collects and empties nothing).
"""

from __future__ import annotations

import functools
import sys

from .. import contract, trace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ..context import Context

_HOOK = "memory"
_CALLBACKS = 5  # the place of `callbacks` among the arguments behind self


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Add the callback to each `Study.optimize`.

    Args:
        name: "optuna.study.study".
        module: that module.
        context: the process's.
    """
    if not context.hooks["memory"]["clear_between_trials"]:
        context.receipt(_HOOK, contract.OFF)
        return
    study: Any = module.Study
    original = study.optimize

    @functools.wraps(original)
    def optimize(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) >= _CALLBACKS:
            args = (*args[: _CALLBACKS - 1], _with_ours(args[_CALLBACKS - 1]), *args[_CALLBACKS:])
        else:
            kwargs["callbacks"] = _with_ours(kwargs.get("callbacks"))
        return original(self, func, *args, **kwargs)

    study.optimize = trace.hidden(optimize)
    context.receipt(_HOOK, contract.APPLIED)


def clear_cache() -> None:
    """Empty torch's CUDA cache before and after a garbage collection; nothing without CUDA in use.

    Never raises: after a sticky error each of these calls fails.
    """
    try:
        cuda = sys.modules["torch"].cuda
        if not cuda.is_initialized():
            return
        import gc

        cuda.empty_cache()
        gc.collect()
        cuda.empty_cache()
    except Exception:
        return


def _with_ours(callbacks: Any) -> list[Any]:
    return [*(callbacks or ()), lambda study, trial: clear_cache()]
