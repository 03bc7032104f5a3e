"""What a step of training costs is counted: calls of functions of the hooks, not milliseconds."""

import json
from typing import Any

import pytest
from ranks import RunRanks
from repo import source

pytestmark = pytest.mark.slow
STEPS = 10  # of count_hook_calls.py, in which it counts
OTHERS = {  # hooks that act while a program is set up or compiled, or between trials
    "compile": {"enabled": "keep", "autotune": "off", "cudagraphs": "off", "fallback": "on"},
    "cudagraph_markers": "off",
    "memory": {"clear_between_trials": True},
    "optuna": {"mode": "on", "recycle_every": 50},
}
GUARDS = {"labels": "on", "embeddings": "on", "logits": "on"}


def calls_of(run_ranks: RunRanks, wrap: str, mode: str, **more: Any) -> dict[str, int]:
    job = run_ranks(source("inject/count_hook_calls"), environ={"WRAP": wrap, "MODE": mode}, **more)
    assert job.code == 0, job.err
    found: dict[str, int] = json.loads(job.out)
    return found


@pytest.mark.parametrize(
    ("wrap", "mode"),
    [("ddp", "eager"), ("fsdp2", "eager"), ("ddp", "inductor"), ("fsdp2", "inductor")],
)
def test_a_step_under_default_hooks_and_shards_calls_no_function_of_theirs(run_ranks, wrap, mode):
    assert calls_of(run_ranks, wrap, mode, excepthook="on", shards="warn") == {}


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_a_step_under_the_hooks_that_hold_settings_calls_no_function_of_theirs(run_ranks, mode):
    assert calls_of(run_ranks, "ddp", mode, order={"mode": "fix"}, **OTHERS) == {}


@pytest.mark.parametrize(
    ("mode", "function", "calls"),
    [
        ("eager", "guarded", 2),  # embedding and cross_entropy
        ("eager", "check_range", 2),
        ("inductor", "guarded", 0),
    ],
)
def test_a_step_with_guards_has_one_check_for_each_loss_and_look_up(
    run_ranks, mode, function, calls
):
    found = calls_of(run_ranks, "ddp", mode, guards=GUARDS)
    assert found.get(function, 0) == calls * STEPS
