"""Step markers do what the profile says, measured on the step counter that cudagraph trees read."""

from __future__ import annotations

import pytest
from interpreters import Interpreters

HEAD = """
import os, torch
from torch.compiler import cudagraph_mark_step_begin as taken_early
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
MARKS = """
from torch._inductor.cudagraph_trees import MarkStepBox
import torch._inductor
ways = {
    "attribute": lambda: torch.compiler.cudagraph_mark_step_begin(),
    "taken early": taken_early,
    "inductor's": torch._inductor.cudagraph_mark_step_begin,
    "inside a compiled function": torch.compile(inside, backend="eager"),
}
before = MarkStepBox.mark_step_counter
for way in ways.values(): way()
print(before - MarkStepBox.mark_step_counter)
"""
INSIDE = """
def inside(x=torch.ones(2)):
    torch.compiler.cudagraph_mark_step_begin()
    return x + 1
"""
RANK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("setting", "group", "steps"),
    [
        pytest.param("keep", False, 4, marks=pytest.mark.slow),
        ("keep", True, 4),
        ("off", False, 0),
        pytest.param("off", True, 0, marks=pytest.mark.slow),
        ("off-when-distributed", False, 4),
        ("off-when-distributed", True, 0),
    ],
)
def test_markers_count_steps_only_where_the_profile_lets_them(
    interpreters: Interpreters, setting: str, group: bool, steps: int
) -> None:
    script = HEAD + (GROUP if group else "") + INSIDE + MARKS
    extra = RANK if group else {}
    ran = interpreters.run(script, hooks={"cudagraph_markers": setting}, **extra)
    assert ran.out == f"{steps}\n", ran.err


@pytest.mark.parametrize(
    ("setting", "steps"),
    [("off-when-distributed", 0), pytest.param("keep", 4, marks=pytest.mark.slow)],
)
def test_markers_do_nothing_in_each_of_two_real_ranks(
    interpreters: Interpreters, torchrun: tuple[str, ...], setting: str, steps: int
) -> None:
    script = interpreters.folder / "two.py"
    script.write_text(HEAD + GROUP + INSIDE + MARKS.replace("print(", "print(f'steps', "))
    ran = interpreters.run(
        hooks={"cudagraph_markers": setting},
        argv=(*torchrun, "--standalone", "--nproc-per-node=2", str(script)),
    )
    assert ran.code == 0, ran.err
    assert ran.out.count(f"steps {steps}") == 2
    if steps == 0:
        told = ran.by("cudagraph_markers", "observed")
        assert sorted(line["rank"] for line in told) == [0, 1]
        assert all(line["effective"] == {"marks": False} for line in told)


def test_markers_come_back_when_the_group_is_gone(interpreters: Interpreters) -> None:
    script = HEAD + GROUP + INSIDE + "dist.destroy_process_group()\n" + MARKS
    hooks = {"cudagraph_markers": "off-when-distributed"}
    assert interpreters.run(script, hooks=hooks, **RANK).out == "4\n"
