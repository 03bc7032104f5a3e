"""Nodes that end, come back, or stand by, and agents that wait for the last one."""

import os
import signal
import sys
from pathlib import Path

import hosts
import pytest
from helpers import until
from hosts import Host, add_up, clean, end_all, meeting, saved
from rights import needs
from runs import Run

pytestmark = [needs("make networks"), pytest.mark.slow]
CARD = hosts.SUMS.with_name("bad_card.py")
SOON = "--rdzv-conf=last_call_timeout=5"


def test_an_elastic_run_goes_on_with_fewer_nodes(three, tmp_path):
    job = add_up(tmp_path, steps=40, step_s=0.5)
    runs = [h.start(*meeting(nnodes="1:2"), SOON, *job) for h in three[:2]]
    saved(tmp_path)
    three[1].kill()
    assert runs[0].end() == 0, runs[0].err
    assert "done total=820.0" in runs[0].out
    assert runs[0].messages()[-1] == "saferun: attempt 2 succeeded"
    assert [len(event["hosts"]) for event in runs[0].events("nodes")] == [2, 1]
    clean(runs[:1])


def test_a_spare_node_takes_the_place_of_one_that_is_gone(three, tmp_path):
    job = add_up(tmp_path, steps=40, step_s=0.5)
    runs = [host.start(*meeting(), *job) for host in three[:2]]
    saved(tmp_path)
    spare = three[2].start(*meeting(), *job)
    hosts.alive(spare, "torchrun")
    three[1].kill()
    assert end_all([runs[0], spare]) == [0, 0], [runs[0].err, spare.err]
    assert "done total=820.0" in runs[0].out
    assert set(runs[0].events("nodes")[-1]["hosts"].values()) == {"h1", "h3"}
    clean([runs[0], spare])


@pytest.mark.parametrize(("nnodes", "shared"), [("2", False), ("2", True), ("1:2", False)])
def test_a_spare_node_takes_the_place_of_one_whose_hardware_failed(
    three, tmp_path, nnodes, *, shared
):
    flag = tmp_path / "flag"
    given = [f"--run-dir={tmp_path / 'runs'}"] if shared else []
    job = ["--set=retry.rejoin_s=300", *given, str(CARD), str(flag)]
    runs = [host.start(*meeting(nnodes=nnodes), *job) for host in three[:2]]
    until(lambda: all((tmp_path / f"up-h{number}").exists() for number in (1, 2)), "ranks")
    runs.append(three[2].start(*meeting(nnodes=nnodes), *job))
    hosts.alive(runs[2], "torchrun")
    flag.touch()
    assert runs[1].end() == 1, runs[1].err
    assert "(gpu-ecc-uncorrectable on rank " in runs[1].err
    assert [runs[0].end(), runs[2].end()] == [0, 0], [runs[0].err, runs[2].err]
    assert [runs[0].out, runs[2].out] == ["done on h1\n", "done on h3\n"]
    clean(runs)


def agent(run: Run) -> int:
    """Return the pid of a host's agent, once its rank has ended."""
    return hosts.alive(run, "bin/torchrun")


def waits_for(three: list[Host], place: Path) -> tuple[list[Run], list[int]]:
    """Start a job whose first rank ends at once, and whose second one stays; return the agents."""
    job = place / "train.py"
    job.write_text(
        "import os, pathlib, signal\n"
        "rank = os.environ['RANK']\n"
        f"pathlib.Path({str(place)!r}, 'up-' + rank).touch()\n"
        "if rank == '1' and os.environ['SAFERUN_ATTEMPT'] == '1':\n"
        "    signal.pause()\n",
        encoding="utf-8",
    )
    runs = [host.start(*meeting(), str(job)) for host in three[:2]]
    until(lambda: all((place / f"up-{rank}").exists() for rank in "01"), "ranks")
    until(lambda: not runs[0].ranks(), "rank 0 has ended")
    return runs, [agent(run) for run in runs]


def test_a_dead_agent_is_noticed_by_one_that_waits_for_it(three, tmp_path):
    """torchrun waits for 300 s and exits with status 0."""
    runs, agents = waits_for(three, tmp_path)
    os.kill(agents[1], signal.SIGKILL)
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    assert [run.messages()[-1] for run in runs] == ["saferun: attempt 2 succeeded"] * 2
    clean(runs)


def test_an_agent_that_waits_for_the_others_answers_a_signal(three, tmp_path):
    runs, _ = waits_for(three, tmp_path)
    ours = f"{sys.executable}\0-m\0saferun\0".encode()
    for pid in runs[0].processes("saferun"):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(ours):
            os.kill(pid, signal.SIGTERM)
    assert runs[0].end() == 1, runs[0].err
    clean(runs[:1])


def test_torchruns_own_restarts_stay_within_an_attempt(three, tmp_path):
    job = tmp_path / "train.py"
    job.write_text(
        "import os, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print('restarts', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    options = ["--max-restarts=2", SOON]
    runs = [host.start(*meeting(nnodes="1:2"), *options, str(job)) for host in three[:2]]
    assert end_all(runs) == [0, 0], [run.err for run in runs]
    assert [len(run.events("ended")) for run in runs] == [1, 1]
    assert "restarts 1" in runs[1].out
    clean(runs)
