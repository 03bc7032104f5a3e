"""The compile hook's policy where graphs come from a cache."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import ForkServers, Job, launch, runner
from releases import needs_torch
from repo import source
from sandbox import unquoted

Run = Callable[..., Job]

pytestmark = pytest.mark.slow
PROBE = source("inject/lowered_graphs")
OFF = {"autotune": "off", "cudagraphs": "off"}
KEEP: dict[str, str] = {}


@pytest.fixture
def run(forks: ForkServers, tmp_path: Path) -> Run:
    return runner(forks, tmp_path)


@needs_torch("2.8", "a cache of whole graphs that is on")
def test_a_second_run_finds_its_graphs_in_the_cache_and_still_tells(run):
    script = f"{PROBE}torch.compile(body, mode='max-autotune')(x).backward(dx)" + (
        "\nfrom torch._dynamo.utils import counters"
        "\nprint(counters['aot_autograd']['autograd_cache_hit'])"
    )
    first, second = (run(script, OFF) for _ in range(2))
    assert (first.out, second.out) == ("0\n", "1\n"), second.err
    assert len([line for line in second.receipts if line.get("graph") == "entry"]) == 2


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


@pytest.mark.parametrize("autograd", ["0", "1"], ids=["inductor's cache", "autograd's cache"])
def test_a_cache_that_was_filled_without_the_policy_is_not_used_under_it(run, autograd):
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


def test_each_rank_gets_compile_caches_of_its_own_that_its_helpers_share(tmp_path):
    """Under the mitigation fresh-compile-cache, below the directories that the launcher made."""
    base = Path(unquoted(tmp_path / "fresh"))
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environ = dict.fromkeys(names, str(base))
    script, mitigations = source("inject/show_caches"), ("fresh-compile-cache",)
    job = launch(tmp_path, script, environ=environ, mitigations=mitigations)
    own = [f"{base}/rank{n}/inductor {base}/rank{n}/triton" for n in (0, 1)]
    expected = [f"{kind} {paths}" for kind in ("helper", "rank") for paths in own]
    assert sorted(job.out.splitlines()) == expected, job.err
    for rank in (0, 1):
        folder = base / f"rank{rank}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert any((folder / "inductor").iterdir())
    reported = [line["rank"] for line in job.hook("compile") if line.get("part") == "caches"]
    assert sorted(reported) == [0, 1]
