"""Step markers do what the profile says, measured on the step counter that cudagraph trees read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Forks, Job

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


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Callable[..., Job]:
    """Runs a script as ranks under a setting of the hook; 0 ranks are one process alone."""

    def run(script: str, setting: str, ranks: int) -> Job:
        more = {"cudagraph_markers": setting}
        return forks.run(tmp_path, script, ranks=ranks, order={"mode": "off"}, more=more)

    return run


@pytest.mark.parametrize(
    ("setting", "ranks", "steps"),
    [
        pytest.param("keep", 0, 4, marks=pytest.mark.slow),
        pytest.param("keep", 2, 4, marks=pytest.mark.slow),
        pytest.param("off", 0, 0, marks=pytest.mark.slow),
        pytest.param("off", 1, 0, marks=pytest.mark.slow),
        ("off-when-distributed", 0, 4),
        ("off-when-distributed", 1, 0),
        ("off-when-distributed", 2, 0),
    ],
)
def test_markers_count_steps_only_where_the_profile_lets_them(
    run: Callable[..., Job], setting: str, ranks: int, steps: int
) -> None:
    job = run(HEAD + (GROUP if ranks else "") + INSIDE + MARKS, setting, ranks)
    assert job.out.splitlines() == [str(steps)] * max(1, ranks), job.err
    observed = [line for line in job.hook("cudagraph_markers") if line["outcome"] == "observed"]
    assert sorted(line["rank"] for line in observed if ranks) == [
        *range(ranks if setting != "keep" else 0)
    ]
    assert all(line["effective"] == {"marks": steps > 0} for line in observed)


def test_markers_come_back_when_the_group_is_gone(run: Callable[..., Job]) -> None:
    """And this process is no rank of several."""
    script = HEAD + GROUP + INSIDE + "dist.destroy_process_group()\n" + MARKS
    assert run(script, "off-when-distributed", 1).out == "4\n"
