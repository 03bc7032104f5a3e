"""Compare the step from which ranks train, at the first steps of an optimizer.

Target: torch.optim.Optimizer._optimizer_step_code, which torch >= 2.4 calls after each `step`. One
of torch's step hooks could not remove itself, since torch iterates over them at that time.
Reason: a rank that does not find the checkpoint that the others load begins at step 0. Nothing
fails, and the run succeeds with wrong weights.
Delete when torch compares what ranks have loaded.

Each rank writes its optimizer's step count (Adam and similar ones have one) to the group's store;
ranks that come later compare. No rank waits: some may have no optimizer. Only optimizers of the
same class and size are compared, by the first parameter with a state. The first step alone proves
nothing: torch.distributed.checkpoint makes one before it loads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import contract, hidden_frames
from .context import Context

_STEPS = 8  # number of steps that are compared, over all optimizers of a process


def watch(c10d: ModuleType, rank: int, agree: str, context: Context) -> None:
    """Compare the first steps of this process with those of the other ranks.

    Args:
        c10d: torch.distributed.distributed_c10d, whose group is initialised.
        rank: the rank of this process.
        agree: value of hooks.init.agree, "error" or "warn".
        context: the process's context.
    """
    torch = sys.modules["torch"]
    optimizers: Any = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    if not hasattr(optimizers, "_optimizer_step_code"):
        return
    seen = 0

    @hidden_frames.replace(optimizers, "_optimizer_step_code")
    def ours(original: Callable[..., Any], self: Any) -> None:
        nonlocal seen
        original(self)
        if torch.compiler.is_compiling() or optimizers._optimizer_step_code is not ours:
            return
        seen += 1
        text = ""
        try:
            if seen == _STEPS:
                optimizers._optimizer_step_code = original
            text = _difference(torch, c10d, self, seen, rank)
        except Exception as error:  # the group is gone, or its store
            optimizers._optimizer_step_code = original
            context.receipt("init", contract.OBSERVED, steps_not_compared=repr(error)[:200])
        if text:
            optimizers._optimizer_step_code = original
            context.receipt("init", contract.APPLIED, rank=rank, differences=[text])
            if agree == "error":
                raise RuntimeError(text + ", or set hooks.init.agree to warn")
            context.say(text)


def _difference(torch: ModuleType, c10d: ModuleType, optimizer: Any, seen: int, rank: int) -> str:
    """Return how this rank and another differ; "" if they agree or no other rank has come."""
    counted = _counted(torch, optimizer)
    if counted is None:
        return ""
    what, steps = counted
    store = c10d._get_default_store()
    first = store.compare_set(f"saferun/steps/{seen}/{what}", "", f"{steps} {rank}").decode()
    theirs, _, other = first.partition(" ")
    if int(theirs) == steps:
        return ""
    return (
        f"ranks train from different steps: the optimizer of rank {rank} has made {steps}, that of "
        f"rank {other} {theirs}. Have all ranks load the same checkpoint"
    )


def _counted(torch: ModuleType, optimizer: Any) -> tuple[str, int] | None:
    """Return which optimizer it is and its step count; None if it counts no steps."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None  # a count on the GPU cannot be read here
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for place, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter)
        if state and "step" in state:
            return f"{type(optimizer).__name__}/{len(parameters)}/{place}", int(state["step"])
    return None
