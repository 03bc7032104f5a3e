"""A run of two hosts: a failure on one is the failure of all, decided once, where it began.

Ranks count without torch where torch's connections are not what a test is about: a rank that waits
for a failed one then waits for ever, as over NCCL.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from cases import slow
from helpers import parent, until
from hosts import Host, add_up, clean, end_all, meeting, saved
from repo import ROOT
from rights import needs
from runs import Run, program

pytestmark = needs("make networks")
EXAMPLE = ROOT / "examples" / "train_gpt.py"


def count(place: Path, fault: str, rank: int, attempts: str = "1") -> list[str]:
    """Return a job that counts to 20 and fails at step 12 of a rank, while the others wait."""
    return [program("counting_job"), str(place / "out"), "20", fault, str(rank), "12", attempts]


def start(pair: list[Host], job: list[str], backend: str = "c10d", *more: str) -> list[Run]:
    found = enumerate(pair)
    return [host.start(*meeting(number, backend=backend), *more, *job) for number, host in found]


def roots(run: Run) -> list[str]:
    """Return the hosts where the failures began, as the nodes agreed."""
    return [event["root"]["host"] for event in run.events("nodes") if event["root"]]


def last_words(run: Run) -> list[str]:
    """Return the report of a failed run, but for the journal's own path."""
    lines = run.messages()
    begun = max(place for place, line in enumerate(lines) if "the run failed" in line)
    return [line for line in lines[begun:] if "journal" not in line]


def agent(run: Run) -> int:
    """Return the pid of a host's agent, whose rank runs."""
    rank = until(lambda: list(run.ranks().values()), "a rank")[0]
    return parent(rank)


@pytest.mark.parametrize("backend", ["c10d", *slow("static")])
def test_a_failure_on_one_node_is_retried_on_all(pair, tmp_path, backend):
    """The rank on the other node waits for ever and says nothing."""
    runs = start(pair, count(tmp_path, "SIGKILL", 1), backend)
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    for run in runs:
        assert run.messages()[-1] == "saferun: attempt 2 succeeded"
        assert roots(run) == ["h2"]
    assert "attempt 1 failed first on host h2, rank 1: killed-from-outside" in runs[0].err
    assert "done step=20" in runs[0].out
    clean(runs)


@pytest.mark.slow
def test_the_example_ends_with_the_loss_of_an_undisturbed_run(pair, tmp_path):
    small = ["--batch=4", "--block=32", "--layers=1", "--width=32", "--steps=60", "--save-every=10"]
    done = []
    for out in ("undisturbed", "killed"):
        saves = tmp_path / out
        runs = start(pair, [str(EXAMPLE), *small, "--eval-every=60", f"--out={saves}", "--resume"])
        if out == "killed":
            until((saves / "checkpoint.pt").exists, "a checkpoint")
            os.kill(
                until(lambda found=runs[1]: list(found.ranks().values()), "a rank")[0],
                signal.SIGKILL,
            )
        assert end_all(runs) == [0, 0], [run.err for run in runs]
        done.append(runs[0].out.splitlines()[-1])
        clean(runs)
    assert "saferun: attempt 2 succeeded" in runs[1].err
    assert done[0] == done[1]
    assert done[0].startswith("done step=60 ")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_all_nodes_end_with_the_same_words(pair, tmp_path, rank):
    runs = start(pair, add_up(tmp_path, "raise", str(rank), "6", "any"), "c10d")
    assert end_all(runs) == [1, 1], [run.err for run in runs]
    argv = last_words(runs[0])
    assert argv == last_words(runs[1])
    assert argv[0].startswith("saferun: the run failed: ")
    assert argv[0].endswith(f"(user-exception on rank {rank}, host h{rank + 1})")
    clean(runs)


@pytest.mark.slow
def test_one_mitigation_is_that_of_all(pair, tmp_path):
    """The other node sees a lost peer, for which there is no mitigation."""
    job = tmp_path / "train.py"
    job.write_text(
        "import os, signal\n"
        "if not os.environ['SAFERUN_MITIGATIONS']:\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('received 0 items of ancdata')\n"
        "    signal.pause()\n"
        "print(os.environ['SAFERUN_ATTEMPT'], os.environ['SAFERUN_MITIGATIONS'])\n",
        encoding="utf-8",
    )
    few = ["prlimit", "--nofile=1000:4000", sys.executable, "-m", "saferun"]
    hosts_and_options = [(host, meeting(number)) for number, host in enumerate(pair)]
    runs = [host.start(*options, str(job), command=few) for host, options in hosts_and_options]
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    assert [run.out for run in runs] == ["2 more-open-files\n"] * 2
    clean(runs)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_killed_agent_is_noticed_by_the_other_node(pair, tmp_path, place):
    runs = start(pair, add_up(tmp_path))
    saved(tmp_path)
    os.kill(agent(runs[place]), signal.SIGKILL)
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    assert "done total=465.0" in runs[0].out
    assert [run.messages()[-1] for run in runs] == ["saferun: attempt 2 succeeded"] * 2
    clean(runs)


@pytest.mark.slow
def test_a_node_without_power_ends_the_run_with_one_clear_sentence(pair, tmp_path):
    runs = start(pair, add_up(tmp_path, step_s=1.0), "c10d", "--set", "retry.rejoin_s=10")
    saved(tmp_path)
    pair[1].lose_power()
    assert runs[0].end() == 1
    assert "not tried again: h2 did not come back in time (retry.rejoin_s: 10 s)" in runs[0].err
    clean(runs[:1])


@pytest.mark.slow
def test_a_cut_that_heals_soon_costs_nothing(pair, tmp_path):
    runs = start(pair, add_up(tmp_path))
    saved(tmp_path)
    pair[1].cut()
    before = pair[1].repeats()
    until(lambda: pair[1].repeats() >= before + 5, "h2 has tried for 6 s to reach h1")
    pair[1].heal()
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    assert not any("attempt" in line for run in runs for line in run.messages())
    clean(runs)


@pytest.mark.slow
def test_a_link_that_is_slow_and_lossy_is_no_death_of_a_node(pair, tmp_path):
    """The rank that is killed is the only failure, and both nodes meet again over that link."""
    pair[1].disturb(delay_ms=200, loss_percent=5)
    runs = start(pair, add_up(tmp_path, "SIGKILL", "1", "6", "1"))
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    assert "done total=465.0" in runs[0].out
    for run in runs:
        assert len(run.events("ended")) == 2
        assert run.messages()[-1] == "saferun: attempt 2 succeeded"
        assert roots(run) == ["h2"]
    assert [event["kind"] for event in runs[1].events("ended")] == [
        *("killed-from-outside", "no-failure")
    ]
    clean(runs)


@pytest.mark.slow
def test_a_node_that_is_silent_is_named_whatever_ends_the_run(pair, tmp_path):
    job = add_up(tmp_path, "SIGKILL", "0", "6", "1", step_s=0.5)
    runs = start(pair, job, "c10d", "--set", "retry.attempts=2")
    runs[0].wait_for_message("attempt 2 starts")
    until(lambda: runs[0].ranks() and runs[1].ranks(), "its ranks")
    pair[1].lose_power()
    assert runs[0].end() == 1
    assert "(node-lost, host h2)\n" in runs[0].err
    clean(runs[:1])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_nodes_whose_run_directory_cannot_be_written_decide_as_one(pair, tmp_path, backend):
    job = add_up(tmp_path, "SIGKILL", "1", "6", "any", step_s=0.1)
    runs = start(pair, job, backend, "--run-dir=/proc/none", "--set=retry.backoff_s=[0, 0]")
    assert end_all(runs) == [1, 1], [run.err for run in runs]
    said = [[line for line in run.messages() if "the run failed" in line] for run in runs]
    assert said[0] == said[1], [run.err for run in runs]
    assert said[0][0].endswith("(killed-from-outside on rank 1, host h2)")
    assert not any("_saferun.inject" in run.err for run in runs)
    clean(runs)
