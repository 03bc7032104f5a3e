"""A search on a real GPU: out of memory, device-side asserts, memory that comes back."""

from __future__ import annotations

import json
import pathlib

import pytest
from runs import run

SEARCH = """
import json, sys, optuna, torch
optuna.logging.set_verbosity(optuna.logging.ERROR)
faults = sys.argv[1] == "faults"
def objective(trial):
    n = trial.suggest_int("n", 1, 12)
    x = trial.suggest_float("x", -1, 1)
    if n == 12:  # more than the GPU has
        if not faults:
            raise optuna.TrialPruned
        hold = torch.empty(1 << 30, device="cuda")
        torch.empty(1 << 40, device="cuda")
    if n == 11:  # an index beyond the end
        if not faults:
            raise optuna.TrialPruned
        table = torch.ones(4, device="cuda")
        return table[torch.tensor([9], device="cuda")].sum().item()
    return float((torch.full((64, 64), x, device="cuda") ** 2).mean()) + n
study = optuna.create_study(storage=f"sqlite:///{sys.argv[1]}.db", study_name="s",
                            sampler=optuna.samplers.RandomSampler(seed=11))
study.optimize(objective, n_trials=100)
print(json.dumps([[t.state.name, t.params, t.value] for t in study.trials]))
"""


@pytest.mark.usefixtures("gpus")
def test_a_search_through_cuda_errors_is_the_undisturbed_one(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "tune.py").write_text(SEARCH)
    words = ["--profile=cpu", "--set=launcher=python", "--set=hooks.optuna.mode=on"]
    found = {}
    for way in ("plain", "faults"):
        with run(tmp_path, *words, "tune.py", way) as job:
            assert job.end(1200) == 0, job.err
            found[way] = json.loads(job.out.splitlines()[-1])
            kinds = [event["kind"] for event in job.events("recycled")]
    assert found["faults"] == found["plain"]
    asserted = sum(params["n"] == 11 for _, params, _ in found["plain"])
    assert asserted
    assert kinds.count("device-side-assert") == asserted
