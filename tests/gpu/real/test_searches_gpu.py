"""A search on a real GPU whose trials fail it in many ways: none of them ends the search.

Five minutes on one H100 or H200: `pytest -n 0 -s tests/gpu/real/test_searches_gpu.py`. Prints what
each way was called by, a line each.
"""

import json

import pytest
from repo import PROGRAMS
from runs import run

TRIALS = 120
ASSERTS, MEMORY = ("ids", "labels"), ("memory", "full")


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "profile", [["hpo"], ["cpu", "--set=launcher=python", "--set=hooks.optuna.mode=on"]]
)
def test_a_search_of_layers_outlives_what_its_trials_do_to_the_gpu(tmp_path, profile):
    """With the guards of `hpo` (labels), and without any."""
    pytest.importorskip("optuna")
    search = PROGRAMS / "gpu" / "search_of_layers.py"
    options = [f"--profile={profile[0]}", *profile[1:], "--set=retry.backoff_s=[0, 0]"]
    with run(tmp_path, *options, str(search), str(tmp_path / "s.db"), str(TRIALS)) as job:
        status = job.end(1100)
        replaced = [event["kind"] for event in job.events("recycled")]
        trials = [json.loads(line) for line in job.out.splitlines() if line.startswith("{")]
        messages = job.messages()
    for trial in trials:
        if trial["way"] or trial["attributes"]:
            print(json.dumps(trial))
    print(json.dumps({"status": status, "replaced": replaced, "messages": messages[-20:]}))
    assert status == 0, job.err
    lost = [one for one in trials if "saferun_cause" in one["attributes"]]
    counted = [one for one in trials if one not in lost]
    assert len(counted) == TRIALS
    states = {
        way: {t["state"] for t in counted if t["way"] == way} for way in ("", "late", "shape")
    }
    assert states == {"": {"COMPLETE"}, "late": {"COMPLETE"}, "shape": {"FAIL"}}
    assert {t["state"] for t in counted if t["way"] in ASSERTS} == {"PRUNED"}
    assert {t["state"] for t in counted if t["way"] in MEMORY} <= {"PRUNED", "COMPLETE"}
    assert {t["state"] for t in counted if t["way"] == "memory"} == {"PRUNED"}
    assert not any("hook guards" in line for line in messages)
    assert len({json.dumps([t["layer"], t["way"], t["x"]]) for t in counted}) == TRIALS
