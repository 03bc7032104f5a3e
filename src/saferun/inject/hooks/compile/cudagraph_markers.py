"""Make `torch.compiler.cudagraph_mark_step_begin` do nothing, if the profile asks for that.

Target: `torch._inductor.cudagraph_trees.mark_step_begin`, which the public function looks up at
each call, so the way in which a script imported the marker does not matter. torch 2.1 to 2.13.
Reason: this fixed an incident with DDP and markers, and is kept for users who want it; current
torch runs DDP, compilation and markers together without an error.
Delete when no shipped profile asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ... import contract, hidden_frames, rank
from ...context import Context

_HOOK = "cudagraph_markers"


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Replace the module's `mark_step_begin` by a function that asks the policy at each call.

    Args:
        name: "torch._inductor.cudagraph_trees".
        module: that module.
        context: the process's context.
    """
    setting = context.hooks.cudagraph_markers
    if setting == "keep":
        context.receipt(_HOOK, contract.OFF)
        return
    if not hasattr(module, "mark_step_begin"):
        context.receipt(_HOOK, contract.NOT_NEEDED, why="this torch has no step markers")
        return
    seen: set[bool] = set()

    @hidden_frames.replace(module, "mark_step_begin")
    def mark_step_begin(original: Callable[[], None]) -> None:
        marks = setting != "off" and not rank.is_distributed()
        if marks not in seen:
            seen.add(marks)
            context.receipt(_HOOK, contract.OBSERVED, effective={"marks": marks})
        if marks:
            original()

    # Dynamo skips the original by its file; our function must not be traced either.
    mark_step_begin._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch's mark
    context.receipt(_HOOK, contract.APPLIED, setting=setting)
