"""A search on a real GPU: no trial is lost by errors of CUDA and by signals.

Four minutes on one H100 or H200: `pytest -n 0 -s tests/gpu/real/test_trials_gpu.py -k accounted`.
"""

import collections
import json
import pathlib

import pytest
from repo import PROGRAMS
from runs import run

TRIALS = 99  # of all workers


def stored(database: pathlib.Path) -> list:
    import optuna

    return optuna.load_study(study_name="s", storage=f"sqlite:///{database}").get_trials()


@pytest.mark.parametrize("workers", [1, 3])
def test_every_trial_of_a_search_on_a_gpu_is_accounted_for(tmp_path, gpus, workers):
    pytest.importorskip("optuna")
    tune = PROGRAMS / "gpu" / "search_with_faults.py"
    argv = ["--profile=hpo", "--set=hooks.optuna.recycle_every=10", f"--set=workers={workers}"]
    argv += ["--set=retry.attempts_total=1000", "--set=locks.slot_memory_gib=1"]
    argv += ["--set=retry.backoff_s=[0, 0]"]
    database = tmp_path / "faulty.db"
    with run(tmp_path, *argv, str(tune), str(database), str(TRIALS // workers), "faulty") as job:
        assert job.end(900) == 0, job.err
        recycled = job.events("recycled")
    trials = stored(database)
    states = collections.Counter(trial.state.name for trial in trials)
    print(json.dumps({"states": states, "replaced": [event["why"] for event in recycled]}))
    assert set(states) <= {"COMPLETE", "PRUNED", "FAIL"}
    assert recycled
    killed = len(list(tmp_path.rglob("struck-*")))
    assert states["FAIL"] == killed > 0
    assert len(trials) == TRIALS + killed
