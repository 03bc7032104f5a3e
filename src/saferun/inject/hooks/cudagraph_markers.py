"""Make `torch.compiler.cudagraph_mark_step_begin` do nothing, where the profile says so.

Target: `torch._inductor.cudagraph_trees.mark_step_begin`, which the public function looks up at
each call: however a script imported the marker, it ends here. torch 2.1 to 2.13.
Reason: the DDP incident's marker fix; kept for those who want it, though current torch runs DDP,
compilation and markers together without fault. Delete when no shipped profile asks for it.
"""

import functools

from _saferun_inject import contract
from _saferun_inject.hooks.compile import choice, is_distributed

_HOOK = "cudagraph_markers"


def apply(name, module, context):
    """Replace the module's `mark_step_begin` by one that asks the policy at each call."""
    setting = choice(context.hooks.get(_HOOK, "keep"))
    if setting == "keep":
        context.receipt(_HOOK, contract.OFF)
        return
    original = getattr(module, "mark_step_begin", None)
    if original is None:
        context.receipt(_HOOK, contract.NOT_NEEDED, why="this torch has no step markers")
        return
    module.mark_step_begin = _silenced(original, setting, context)
    context.receipt(_HOOK, contract.APPLIED, setting=setting)


def _silenced(original, setting, context):
    seen = set()

    @functools.wraps(original)
    def mark_step_begin():
        marks = setting != "off" and not is_distributed()
        if marks not in seen:
            seen.add(marks)
            context.receipt(_HOOK, contract.OBSERVED, effective={"marks": marks})
        if marks:
            original()

    # Dynamo skips the original by its file; ours must not be traced either.
    mark_step_begin._torchdynamo_disable = True
    return mark_step_begin
