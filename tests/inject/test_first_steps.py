"""Ranks that train from different steps are refused, whatever led to it."""

import re
import sys

import pytest
from repo import source


@pytest.mark.parametrize(
    ("loaded", "environ", "refused"),
    [
        ("20 0", {}, ("21", "1")),
        ("20 10", {}, ("21", "11")),
        ("20 0", {"MADE": "1"}, ("21", "2")),  # the second step tells
        ("20 20", {}, ()),
        ("20 20", {"MADE": "1"}, ()),
        ("20 idle", {}, ()),
        ("0 0", {"OPTIMIZER": "SGD"}, ()),
    ],
)
def test_ranks_that_train_from_different_steps_are_refused(run_ranks, loaded, environ, refused):
    job = run_ranks(source("inject/steps_of_ranks"), environ={"LOADED": loaded, **environ})
    if not refused:
        idle = "idle" in loaded or "OPTIMIZER" in environ
        assert (job.code, job.messages(), job.out.count("trained ")) == (0, [], 2)
        assert idle or job.out.count("trained Optimizer._optimizer_step_code") == 2
        return
    assert job.code == 1
    found = re.search(
        r"RuntimeError: ranks train from different steps: the optimizer of rank \d has made (\d+), "
        r"that of rank \d (\d+)\. Have all ranks load the same checkpoint",
        job.err,
    )
    assert found
    assert set(found.groups()) == set(refused)
    assert sys.version_info < (3, 11) or "first_steps.py" not in job.err


@pytest.mark.parametrize(("agree", "said"), [("warn", 1), ("off", 0)])
def test_where_ranks_need_not_agree_they_train_on(run_ranks, agree, said):
    environ = {"LOADED": "20 0"}
    job = run_ranks(source("inject/steps_of_ranks"), environ=environ, init={"agree": agree})
    assert (job.code, job.out.count("trained Optimizer.")) == (0, 2)
    assert len(job.messages("ranks train from different steps")) == said
