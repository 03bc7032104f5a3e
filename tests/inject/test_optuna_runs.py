"""Searches whose processes are replaced or killed, as whole runs: the storage has the truth."""

import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from repo import PROGRAMS
from runs import ran, run
from sandbox import text_of, write
from studies import check_account, recorded, stored

SEARCH = str(PROGRAMS / "optuna" / "search.py")
STAY = str(PROGRAMS / "optuna" / "stay_in_trial.py")
ONCE = str(PROGRAMS / "optuna" / "once_only.py")
THREADS = str(PROGRAMS / "optuna" / "failing_threads.py")
QUEUED = str(PROGRAMS / "optuna" / "queued_trials.py")
REGION = str(PROGRAMS / "optuna" / "failing_region.py")
HEARTBEAT = str(PROGRAMS / "optuna" / "heartbeat.py")
ALL = "memory,assert,crash,kill,term,locked,full"
HPO = [
    "--profile=cpu",
    *("--set=launcher=python", "--set=retry.backoff_s=[0, 0]", "--set=retry.attempts_total=1000"),
    "--set=hooks.optuna.mode=on",
]
QUIET = "import optuna, os, signal, sys\noptuna.logging.set_verbosity(optuna.logging.ERROR)\n"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: a trial in SQLite waits for the disk ten times."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)
    with tempfile.TemporaryDirectory(dir=shared) as made:
        yield Path(made)


def hpo(folder: Path, *argv: str, every: int = 0, start: Any = ran, **options: Any) -> Any:
    return start(folder, *HPO, f"--set=hooks.optuna.recycle_every={every}", *argv, **options)


def script(folder: Path, text: str) -> str:
    return str(write(folder / "tune.py", QUIET + text))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "sampler", "trials", "every"),
    [("journal", "random", 14, 5), *slow(("sqlite", "tpe", 60, 25), ("sqlite", "random", 500, 50))],
)
def test_a_search_through_all_faults_has_its_trials_and_proposes_none_twice(
    folder, kind, sampler, trials, every
):
    with hpo(folder, SEARCH, kind, sampler, str(trials), ALL, every=every, start=run) as job:
        assert job.end(3500) == 0, job.err
        assert job.events("recycled")
        records = recorded(job)
    found = stored(folder, kind)
    check_account(found, records)
    again = {t.system_attrs.get("saferun_retry_of") for t in found} - {None}
    assert len(found) - len(again) == trials
    assert all(found[number].state.name == "FAIL" for number in again)
    if sampler == "tpe":  # it proposes good ones of the 504 points again, with or without us
        return
    proposed = [json.dumps(t.params) for t in found if "saferun_retry_of" not in t.system_attrs]
    points = 504
    expected = points * (1 - (1 - 1 / points) ** len(proposed))  # different ones of so many draws
    assert len(set(proposed)) > 0.85 * expected


def test_a_search_asks_the_context_prunes_and_goes_on_in_a_new_process(folder):
    """Whatever words a poisoned context has; a library's own error is tried again once."""
    path = {"PYTHONPATH": str(PROGRAMS / "inject")}
    job = hpo(folder, str(PROGRAMS / "optuna" / "failing_gpu.py"), env=path)
    kinds = collections.Counter(event["kind"] for event in job.events("recycled"))
    records = recorded(job)
    assert "10 trials, 4 of them run twice, best 0; 2 processes crashed, 7 replaced" in job.err
    show = [sys.executable, "-m", "saferun", "runs", "show", str(job.journal)]
    listed = [*show[:-2], "list", "--json"]
    shown, report, runs = (
        subprocess.run(one, env=job.environ, capture_output=True, text=True, check=True).stdout
        for one in (show, [*show[:-2], "report", show[-1]], listed)
    )
    assert kinds == {"device-side-assert": 4, "cublas-cudnn-failed": 2, "cuda-oom": 1}
    trials = stored(folder, "journal")
    check_account(trials, records)
    by_way: dict[int, list[str]] = {}
    for trial in trials:
        by_way.setdefault(trial.params["way"], []).append(trial.state.name)
    assert list(by_way.values()) == [
        ["COMPLETE"],
        ["PRUNED"],
        ["PRUNED"],
        ["PRUNED"],
        ["COMPLETE"],
        ["FAIL", "COMPLETE"],
        ["FAIL", "PRUNED"],
        ["PRUNED"],
        ["FAIL", "FAIL"],
        ["FAIL", "COMPLETE"],
    ]
    (handle,) = [trial for trial in trials if trial.params["way"] == 1]
    assert "device-side assert triggered" in handle.user_attrs["cuda_error_msg"]
    assert "ended its process: SIGSEGV; way=8, x=" in shown
    assert report.count("- trial: `8 ended the process: way=8, x=") == 1
    assert "  replaced  7 processes: " in shown
    assert json.loads(runs)["runs"][0]["attempts"] == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
@pytest.mark.parametrize(("runs", "workers"), [(3, 1), (1, 3)])
def test_three_processes_that_share_a_study_cover_its_grid(folder, kind, runs, workers):
    """The grid has 504 points; each process may take all, and stops when there are no more."""
    argv = [f"--set=workers={workers}", SEARCH, kind, "grid", "600", ALL]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(hpo(folder, *argv, every=50, start=run)) for _ in range(runs)]
        with ThreadPoolExecutor(runs) as readers:  # a job whose output nobody reads stands still
            statuses = list(readers.map(lambda job: job.end(3500), jobs))
        assert statuses == [0] * runs, "\n".join(job.err for job in jobs)
        journals = sorted((folder / "home").rglob("trials.jsonl"))
    records = [json.loads(line) for path in journals for line in text_of(path).splitlines()]
    trials = stored(folder, kind)
    check_account(trials, records)
    points = {json.dumps(t.params, sort_keys=True) for t in trials if t.state.name != "FAIL"}
    failed = [json.dumps(t.params, sort_keys=True) for t in trials if t.state.name == "FAIL"]
    crashed = {point for point in failed if failed.count(point) > 1 and point not in points}
    assert len(points | crashed) == 504


def test_a_trial_in_the_queue_of_a_sqlite_study_is_taken_once(folder):
    job = hpo(folder, str(PROGRAMS / "optuna" / "two_takers.py"))
    check_account(trials := stored(folder, "sqlite"), recorded(job))
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("deaths", [2, *slow(50)])
def test_a_search_whose_processes_die_is_the_same_where_warm_ones_replace_them(folder, deaths):
    found, starts = [], []
    for way in ("spawn", "warm"):
        (folder / way).mkdir()
        argv = [f"--set=start.ranks={way}", str(PROGRAMS / "optuna" / "dies_often.py")]
        env = {"WAY": way, "PYTHONPATH": str(PROGRAMS / "faults")}
        with hpo(folder / way, *argv, str(deaths), env=env, start=run) as job:
            assert job.end(3500) == 0, job.err
            check_account(stored(folder / way, "journal"), recorded(job))
            assert "started as usual" not in job.err
        found.append([(t.state, t.params) for t in stored(folder / way, "journal")])
        lines = text_of(folder / way / "starts").splitlines()
        starts.append([line.split()[0] for line in lines])
    assert found[1] == found[0]
    assert starts == [["first"] * (deaths + 1), ["first"] + ["ahead"] * deaths]


QUEUE = {  # which trials end their process, by what; their states, by the point in the queue
    "two crash once": ("trial.number < 2", "SIGSEGV", [["FAIL", "COMPLETE"]] * 2),
    "one is always killed": ("x == 0.25", "SIGKILL", [["FAIL", "FAIL"], ["COMPLETE"]]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "how", "states"), QUEUE.values(), ids=QUEUE)
def test_a_trial_that_ends_its_process_is_run_again_once(folder, which, how, states):
    job = hpo(folder, QUEUED, which, how, "3")
    check_account(trials := stored(folder, "sqlite"), recorded(job))
    queued = [[t.state.name for t in trials if t.params["x"] == point] for point in (0.25, 0.5)]
    assert queued == states
    assert trials[-1].state.name == "COMPLETE"


@pytest.mark.slow
def test_a_search_whose_processes_always_end_is_not_started_for_ever(folder):
    hpo(folder, QUEUED, "True", "SIGKILL", "99", status=128 + 9)
    assert len(stored(folder, "sqlite")) < 20


@pytest.mark.slow
@pytest.mark.parametrize("mine", ["len(s.trials)", "sum(t.state.is_finished() for t in s.trials)"])
def test_a_script_that_takes_off_finished_trials_by_itself_makes_all(folder, mine):
    text = f"""
s = optuna.create_study(study_name="s", storage="sqlite:///{folder}/study.db", load_if_exists=True)
def f(t):
    if t.number in (3, 7): {KILL}
    return t.suggest_float("x", 0, 1)
s.optimize(f, n_trials=12 - {mine})
"""
    with hpo(folder, script(folder, text), every=4, start=run) as job:
        job.end()
    states = [trial.state.name for trial in stored(folder, "sqlite")]
    assert states.count("COMPLETE") == 12, states


@pytest.mark.slow
def test_what_a_script_does_once_is_not_done_again(folder):
    """Old study deleted, new one made, trials queued, several calls, callbacks that count."""
    job = hpo(folder, ONCE)
    lines = job.out.splitlines()
    assert lines[0] == "none to delete"
    assert lines[1:-1] == [f"after {number}" for number in (0, 1, 2, 3, 4, 5, 7, 8, 9)]
    assert lines[-1] == "end 10 [7, 8, 9]"
    assert [event["kind"] for event in job.events("recycled")] == ["device-side-assert"]
    trials = stored(folder, "sqlite")
    assert [trial.params["x"] for trial in trials[:2]] == [0.25, 0.5]
    assert trials[6].user_attrs == {"saferun_cause": "its process ended (SIGKILL)"}
    assert trials[7].params == trials[6].params
    assert trials[3].state.name == "PRUNED"
    assert trials[3].user_attrs["cuda_error"] is True


@pytest.mark.slow
@pytest.mark.parametrize("argv", [[], ["catch"]])
def test_threads_end_before_their_process_is_replaced(folder, argv):
    job = hpo(folder, THREADS, *argv)
    assert job.out == "7\n"
    assert len(job.events("recycled")) == 1
    check_account(stored(folder, "sqlite"), records := recorded(job))
    states = [trial.state.name for trial in stored(folder, "sqlite")]
    assert sorted(states[:2]) == ["FAIL", "PRUNED"]
    assert states[2:] == ["COMPLETE"] * 5
    assert any(record["cause"].startswith("GPU unusable since trial") for record in records)


@pytest.mark.slow
def test_a_grid_is_not_over_while_points_of_killed_trials_wait(folder):
    """For the sampler a failed trial is one that was made: it stops the study at the next."""
    job = hpo(folder, str(PROGRAMS / "optuna" / "last_points.py"))
    check_account(stored(folder, "sqlite"), recorded(job))
    trials = stored(folder, "sqlite")
    assert [trial.state.name for trial in trials] == ["FAIL"] * 2 + ["COMPLETE"] * 2
    assert sorted(trial.params["x"] for trial in trials[2:]) == [1, 2]


@pytest.mark.slow
def test_a_loop_of_ask_and_tell_leaves_no_trial_running(folder):
    text = f"""
study = optuna.create_study(study_name="s", storage="sqlite:///study.db",
                            sampler=optuna.samplers.RandomSampler(3))
while len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) < 4:
    trial = study.ask()
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 2:
        {KILL}
    study.tell(trial, x)
"""
    job = hpo(folder, script(folder, text))
    assert "the script counts its trials itself" in job.err
    check_account(stored(folder, "sqlite"), recorded(job))
    trials = stored(folder, "sqlite")
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2 + ["FAIL"] + ["COMPLETE"] * 2
    assert trials[3].params == trials[2].params


@pytest.mark.parametrize("place", ["journal", *slow("sqlite")])
def test_a_run_that_ends_in_a_trial_leaves_it_failed(folder, place):
    address = "sqlite:///study.db" if place == "sqlite" else place
    with hpo(folder, STAY, address, start=run) as job:
        assert job.process.stdout.readline() == b"here\n"
        job.process.terminate()
        assert job.end() == 128 + 15, job.err
        check_account(stored(folder, place), recorded(job))
    assert [trial.state.name for trial in stored(folder, place)] == ["COMPLETE", "FAIL"]
    assert stored(folder, place)[1].user_attrs == {"saferun_cause": "its process ended (SIGTERM)"}


@pytest.mark.parametrize(
    ("raised", "states"),
    [
        *slow(("sys.exit()", ["COMPLETE", "FAIL"])),
        # As Lightning ends a training on SIGTERM: the trial is one that was killed.
        ("raise SIGTERMException", ["COMPLETE", "FAIL", "COMPLETE"]),
    ],
)
def test_a_trial_whose_process_ends_with_status_0_is_not_left_running(folder, raised, states):
    text = f"""
class SIGTERMException(SystemExit):
    pass
study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
def objective(trial):
    if trial.number == 1:
        {raised}
    return 1.0
study.optimize(objective, n_trials=2)
"""
    job = hpo(folder, script(folder, text))
    check_account(trials := stored(folder, "sqlite"), recorded(job))
    assert [trial.state.name for trial in trials] == states
    assert trials[1].user_attrs["saferun_cause"].startswith("its process ended (")


@pytest.mark.slow
def test_a_script_with_a_callback_for_trials_without_heartbeat_has_it_called_at_once(folder):
    """The script's callback puts the killed trial into the queue, and all else stays the same."""
    job = hpo(folder, HEARTBEAT)
    lines = ["0 None", "1 None", "2 None", "3 2", "4 2", "5 None"]
    assert job.out.splitlines() == lines, job.err
    check_account(stored(folder, "sqlite"), recorded(job))
    trials = stored(folder, "sqlite")
    assert [t.state.name for t in trials] == [*["COMPLETE"] * 2, *["FAIL"] * 2, *["COMPLETE"] * 2]
    assert trials[4].user_attrs == {}
    assert trials[2].params == trials[3].params == trials[4].params
    assert len({trials[number].params["x"] for number in (0, 1, 4, 5)}) == 4


def test_a_study_whose_database_is_deleted_in_a_trial_is_said_and_none_is_made(folder):
    text = """
study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
def objective(trial):
    if trial.number == 2:
        os.unlink("study.db")
    return trial.suggest_float("x", 0, 1)
study.optimize(objective, n_trials=4)
"""
    job = hpo(folder, script(folder, text), status=1)
    assert [event["kind"] for event in job.events("ended")] == ["study-storage-gone"]
    assert job.err.count("was deleted, moved or made read-only while the study ran") == 1
    assert "may still be marked as running" not in job.err
    assert not (folder / "study.db").exists()


@pytest.mark.slow
def test_timeout_counts_from_the_first_process(folder):
    """The only trial lasts longer than `timeout`; its process is killed, and no other begins."""
    text = f"""
import time
study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
def objective(trial):
    time.sleep(1.5)
    {KILL}
study.optimize(objective, timeout=1)
print("end", [trial.state.name for trial in study.trials])
"""
    job = hpo(folder, script(folder, text))
    assert job.out == "end ['FAIL']\n"


def test_a_script_without_a_study_is_as_without_us(folder):
    job = hpo(folder, script(folder, "print('none')"))
    assert job.out == "none\n"
    assert len(job.err.splitlines()) == 1  # which profile


@pytest.mark.slow
def test_a_script_that_deletes_its_storage_begins_anew_and_is_not_replaced(folder):
    text = """
if os.path.exists("study.db"):
    os.unlink("study.db")
study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=7)
print(len(study.trials))
"""
    job = hpo(folder, script(folder, text), every=3)
    assert job.out == "7\n"
    assert len(job.events("recycled")) == 1
    assert "its storage was deleted or replaced" in job.err


@pytest.mark.slow
def test_the_trials_of_a_run_are_shown_by_cause_and_region(folder):
    job = hpo(folder, REGION)
    options = ((), ("--json",), ("--csv",))
    shown, as_json, as_csv = (job.ask("runs", "show", "last", *option) for option in options)
    assert "\n8 trials\n  completed 3\n" in shown
    assert "  pruned    5: 3 cuda-oom, 1 device-side-assert, 1 pruner\n" in shown
    assert "  replaced  1 process: 1 device-side-assert\n" in shown
    assert "  batch      32" in shown
    found = json.loads(as_json)["trials"]
    assert found["pruned"] == {"cuda-oom": 3, "device-side-assert": 1, "pruner": 1}
    assert found["regions"][0]["param"] == "batch"
    assert found["regions"][0]["failed"] == found["regions"][0]["trials"] == 3
    assert len(as_csv.splitlines()) == 9
    assert as_csv.startswith("study,number,state,cause,values,seconds,worker,attempt,param.batch")
