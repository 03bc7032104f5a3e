"""The compile hook's policy where graphs come from a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Forks, Job, runner
from repo import source

Run = Callable[..., Job]

PROBE = source("inject/lowered_graphs")
OFF = {"autotune": "off", "cudagraphs": "off"}
KEEP: dict[str, str] = {}


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Run:
    return runner(forks, tmp_path)


CACHED = (
    PROBE
    + """
import os
import torch._functorch.config
from torch._dynamo.utils import counters
torch._functorch.config.enable_autograd_cache = os.environ["AUTOGRAD"] == "1"
torch.compile(body, mode="max-autotune")(x).backward(dx)
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
show([[graph["max_autotune"] for graph in lowered], hits > 0])
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("autograd", ["0", "1"], ids=["inductor's cache", "autograd's cache"])
def test_a_cache_that_was_filled_without_the_policy_is_not_used_under_it(
    run: Run, autograd: str
) -> None:
    expected = [
        (KEEP, [[True, True], False]),
        (OFF, [[False, False], False]),
        (OFF, [[], True]),
        (KEEP, [[], True]),
    ]
    for setting, found in expected:
        ran = run(CACHED, setting, AUTOGRAD=autograd)
        assert json.loads(ran.out) == found, ran.err
    entries = [line["effective"] for line in ran.hook("compile") if line.get("graph") == "entry"]
    assert sorted(entry["max_autotune"] for entry in entries) == [False, False, True, True]


ARTIFACTS = (
    PROBE
    + """
import os, pathlib
kept = pathlib.Path(os.environ["KEPT"])
if kept.exists(): torch.compiler.load_cache_artifacts(kept.read_bytes())
torch.compile(body, mode="max-autotune")(x).backward(dx)
if not kept.exists(): kept.write_bytes(torch.compiler.save_cache_artifacts()[0])
show([graph["max_autotune"] for graph in lowered])
"""
)


@pytest.mark.slow
def test_artifacts_that_were_made_without_the_policy_are_not_used_under_it(
    run: Run, tmp_path: Path
) -> None:
    for number, (setting, expected) in enumerate([(KEEP, [True, True]), (OFF, [False, False])]):
        place = {
            "KEPT": str(tmp_path / "kept"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(number)),
        }
        ran = run(ARTIFACTS, setting, **place)
        assert json.loads(ran.out) == expected, ran.err
