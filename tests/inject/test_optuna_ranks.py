"""A study that rank 0 of a distributed job has, as whole runs; the launcher needs no torch."""

import pytest
from repo import PROGRAMS
from runs import ran, small_torchrun
from studies import stored

SHARED = str(PROGRAMS / "optuna" / "rank_zero.py")


@pytest.mark.parametrize("argv", [[], pytest.param(["always"], marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_trial_leaves_none_running(tmp_path, argv):
    """The next attempt loads the study, and its sampler proposes the same parameters again."""
    options = ["--profile=cpu", "--set=hooks.optuna.mode=on", "--set=retry.backoff_s=[0, 0]"]
    options += ["--nproc-per-node=2", "--set=retry.attempts_total=3"]
    environ = {**small_torchrun(tmp_path), "SMALL_TORCHRUN_REPORTS": "1"}
    ran(tmp_path, *options, SHARED, *argv, env=environ, status=bool(argv))
    trials = stored(tmp_path, "sqlite")
    states = [trial.state.name for trial in trials]
    assert states == ["COMPLETE", *(["FAIL"] * 3 if argv else ["FAIL", "COMPLETE", "COMPLETE"])]
    assert trials[1].user_attrs == {"saferun_cause": "its process ended (status 1)"}
    assert trials[2].params == trials[1].params
