"""A search on a real GPU: out of memory, a device-side assert and SIGKILL lose no trial."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys

import pytest
from runs import run

SEARCH = """
import os, signal, sys
import optuna, torch
optuna.logging.set_verbosity(optuna.logging.ERROR)
database, trials, faulty = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["faulty"]
def is_first(name):
    try:
        os.close(os.open(f"struck-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
def objective(trial):
    x = trial.suggest_float("x", -2, 2)
    way = int((x + 2) * 1e6) % 20
    table = torch.ones(64, 1, device="cuda")
    if way == 3:  # the parameters ask for more memory than there is
        if faulty: torch.empty(1 << 43, dtype=torch.uint8, device="cuda")
        raise optuna.TrialPruned
    if way == 5:  # or for a token that is not in the table
        if faulty:
            torch.nn.functional.embedding(torch.tensor([70], device="cuda"), table)
            torch.cuda.synchronize()
        raise optuna.TrialPruned
    if way == 7 and faulty and is_first(x): os.kill(os.getpid(), signal.SIGKILL)
    return ((table * x - 1) ** 2).mean().item()
study = optuna.create_study(
    storage=f"sqlite:///{database}", study_name="s", sampler=optuna.samplers.RandomSampler(seed=3),
    load_if_exists=True,
)
study.optimize(objective, n_trials=trials)
print(study.best_value, flush=True)
"""


def stored(database: pathlib.Path) -> list:
    import optuna

    return optuna.load_study(study_name="s", storage=f"sqlite:///{database}").get_trials()


@pytest.mark.parametrize("workers", [1, 3])
def test_every_trial_of_a_search_on_a_gpu_is_accounted_for(tmp_path, gpus, workers):
    pytest.importorskip("optuna")
    tune = tmp_path / "tune.py"
    tune.write_text(SEARCH)
    words = ["--profile=hpo", "--set=hooks.optuna.recycle_every=10", f"--set=workers={workers}"]
    words += ["--set=retry.attempts_total=1000", "--set=locks.slot_memory_gib=1"]
    database = tmp_path / "faulty.db"
    with run(tmp_path, *words, str(tune), str(database), str(60 // workers), "faulty") as job:
        assert job.end(400) == 0, job.err
        recycled = job.events("recycled")
    trials = stored(database)
    states = collections.Counter(trial.state.name for trial in trials)
    print(json.dumps({"states": states, "replaced": [event["why"] for event in recycled]}))
    assert set(states) <= {"COMPLETE", "PRUNED", "FAIL"}
    assert recycled
    killed = len(list(tmp_path.rglob("struck-*")))
    assert states["FAIL"] == killed > 0
    assert len(trials) == 60 + killed
    if workers == 1:
        plain = [sys.executable, str(tune), str(tmp_path / "plain.db"), "60"]
        best = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert float(best.stdout) == min(t.value for t in trials if t.value is not None)


HUNDRED = """
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
    words = ["--profile=cpu", "--set=launcher=python", "--set=hooks.optuna.mode=on"]
    found = {}
    for way in ("plain", "faults"):
        (tmp_path / way).mkdir()
        (tmp_path / way / "tune.py").write_text(HUNDRED)
        with run(tmp_path / way, *words, "tune.py", way) as job:
            assert job.end(1200) == 0, job.err
            found[way] = json.loads(job.out.splitlines()[-1])
            kinds = [event["kind"] for event in job.events("recycled")]
    assert found["faults"] == found["plain"]
    asserted = sum(params["n"] == 11 for _, params, _ in found["plain"])
    assert asserted
    assert kinds.count("device-side-assert") == asserted
