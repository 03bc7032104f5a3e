"""Mark steps in four ways and print how many count: in a group, or in one that is gone (GROUP)."""

import os

import torch
import torch.distributed as dist
from torch.compiler import cudagraph_mark_step_begin as taken_early

if os.environ["GROUP"]:
    dist.init_process_group("gloo")
    dist.barrier()  # or one may leave while the other still connects
if os.environ["GROUP"] == "gone":
    dist.destroy_process_group()


def inside(x=torch.ones(2)):  # noqa: B008 - a tensor that is made outside what is compiled
    torch.compiler.cudagraph_mark_step_begin()
    return x + 1


def main():
    import torch._inductor
    from torch._inductor.cudagraph_trees import MarkStepBox

    ways = {
        "attribute": lambda: torch.compiler.cudagraph_mark_step_begin(),
        "taken early": taken_early,
        "inductor's": torch._inductor.cudagraph_mark_step_begin,
        "inside a compiled function": torch.compile(inside, backend="eager"),
    }
    before = MarkStepBox.mark_step_counter
    for way in ways.values():
        way()
    print(f"steps={before - MarkStepBox.mark_step_counter};")


main()
