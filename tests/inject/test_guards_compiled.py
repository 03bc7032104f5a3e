"""Guards in compiled code: the same errors, no graph break, nothing where they would not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from interpreters import Interpreters, Ran
from ranks import line_of
from repo import source

CASES = source("inject/compiled_guards")
ON = dict.fromkeys(("labels", "logits", "embeddings", "compiled"), "on")
CHECKED = ["plain", "checkpointed", "bags", "dynamic"]
LEFT_ALONE = ["transformed", "custom", "graphs"]


def compiled(interpreters: Interpreters, **extra: str) -> tuple[dict[str, Any], Ran]:
    ran = interpreters.run(CASES, hooks={"guards": ON}, RANK="3", **extra)
    assert ran.code == 0, ran.err
    return json.loads(ran.out), ran


@pytest.mark.slow
def test_compiled_code_is_checked_where_that_is_asked_for_without_a_graph_break(
    interpreters: Interpreters,
) -> None:
    found, ran = compiled(interpreters)
    for way in CHECKED + LEFT_ALONE:
        result = found[way]
        assert (result["same"], result["after"]) == (True, True), way
        assert (result["breaks"], result["graphs"]) == (0, 1), way
        assert bool(result["checks"]) is (way in CHECKED), way
        assert ("labels out of range: " in result["label"]) is (way in CHECKED), way
        assert ("(rank 3), compiled" in result["token"]) is (way in CHECKED), way
    plain = found["plain"]
    assert plain["label"].startswith("IndexError: cross_entropy: labels out of range: -93, 10 (2 ")
    assert plain["label"].endswith(f"script.py:{line_of(CASES, '# here')}")
    assert "labels out of range: 10 (1 of 4" in found["bags"]["label"]  # the ignored one is another
    assert (found["exported"], found["eager"]) == (0, False)
    assert {line["count"] for line in ran.by("guards") if "count" in line} == {2}


@pytest.mark.slow
def test_checks_hold_where_inductors_own_code_came_from_the_cache(
    interpreters: Interpreters,
) -> None:
    for hits in (None, 1):
        found, _ = compiled(interpreters, REAL="1", WAYS="plain")
        plain = found["plain"]
        assert (plain["same"], plain["breaks"], plain["graphs"]) == (True, 0, 1)
        assert plain["cached"].get("autograd_cache_hit") == hits
        assert "autograd_cache_bypass" not in plain["cached"]
        assert "out of range: -93, 10" in plain["label"]
        assert "out of range: 50 (1 of 4 values" in plain["token"]
