"""Whatever strikes two hosts, and whenever: the run ends right, and nothing of it is left."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import hosts
import pytest
from helpers import until
from hosts import PORT, Host, clean, end_all
from runs import Run

pytestmark = [
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()),
    pytest.mark.slow,
]
SUMS = Path(__file__).parents[1] / "programs" / "nodes" / "summing_job.py"
SEEDS = int(os.environ.get("SAFERUN_TEST_STRIKES", "6"))


def start(host: Host, place: Path, *, shared: bool) -> Run:
    ours = ["--profile=cpu", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    ours += [f"--rdzv-endpoint=h1:{PORT}", "--rdzv-id=job", "--set", "retry.rejoin_s=300"]
    ours += [f"--run-dir={place / 'runs'}"] if shared else []
    return host.start(*ours, str(SUMS), str(place / "out"), "30", "0.2")


def steps_done(place: Path) -> int:
    path = place / "out" / "saved"
    return int(path.read_text().split()[0]) if path.exists() else 0


def strike(chance: random.Random, pair: list[Host], runs: list[Run], *, shared: bool) -> str:
    """Do one bad thing to one host; start saferun there again where nothing of it is left."""
    place = chance.randrange(2)
    host, run = pair[place], runs[place]
    what = chance.choice(["rank", "agent", "keeper", "node", "cut", "slow"])
    if what in ("rank", "agent"):
        rank = until(lambda: list(run.ranks().values()), "a rank")[0]
        stat = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()
        os.kill(rank if what == "rank" else int(stat[1]), signal.SIGKILL)
    elif what == "keeper":
        os.kill(run.keeper(), signal.SIGKILL)
    elif what == "node":
        host.kill()
        host.boot()
        runs[place] = start(host, host.folder.parent, shared=shared)
    elif what == "cut":
        before = host.repeats()
        host.cut()
        until(lambda: host.repeats() >= before + chance.randint(1, 6), "it tries in vain")
        host.heal()
    elif not host.disturb():
        host.slow()
    return f"{what} on {host.name}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_hosts_that_are_struck_finish_the_job(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    shared, struck = chance.random() < 0.5, []
    with hosts.standing(tmp_path, 2) as pair:
        runs = [start(host, tmp_path, shared=shared) for host in pair]
        for at in sorted(chance.sample(range(2, 24, 2), chance.choice([1, 2]))):
            until(lambda at=at: steps_done(tmp_path) >= at, f"step {at}")
            struck.append(f"{strike(chance, pair, runs, shared=shared)} at {at}")
        assert end_all(runs) == [0, 0], (struck, [run.err for run in runs])
        assert "done total=465.0" in runs[0].out, struck
        clean(runs)
