"""Whatever strikes two to four hosts, and when: the run ends right, and nothing of it is left."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import hosts
import pytest
from helpers import until
from hosts import PORT, Host, clean, locked
from runs import Run

pytestmark = [
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()),
    pytest.mark.slow,
    pytest.mark.timeout(3000),
]
LIMIT_S = 900  # for a part of a run: four imports of torch on a machine that is busy take minutes
SUMS = Path(__file__).parents[1] / "programs" / "nodes" / "summing_job.py"
SEEDS = int(os.environ.get("SAFERUN_TEST_STRIKES", "6"))


def start(host: Host, place: Path, *, count: int, shared: bool) -> Run:
    ours = ["--profile=cpu", f"--nnodes={count}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    ours += [f"--rdzv-endpoint=h1:{PORT}", "--rdzv-id=job", "--set", "retry.rejoin_s=300"]
    ours += [f"--run-dir={place / 'runs'}"] if shared else []
    return host.start(*ours, str(SUMS), str(place / "out"), "30", "0.2")


def steps_done(place: Path) -> int:
    path = place / "out" / "saved"
    return int(path.read_text().split()[0]) if path.exists() else 0


def strike(chance: random.Random, struck: list[Host], runs: list[Run], *, shared: bool) -> str:
    """Do one bad thing to one host; start saferun there again where nothing of it is left."""
    place = chance.randrange(len(struck))
    host, run = struck[place], runs[place]
    what = chance.choice(["rank", "agent", "keeper", "node", "cut", "slow", "lossy"])
    if what in ("rank", "agent"):
        rank = until(lambda: list(run.ranks().values()), "a rank")[0]
        stat = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()
        os.kill(rank if what == "rank" else int(stat[1]), signal.SIGKILL)
    elif what == "keeper":
        os.kill(run.keeper(), signal.SIGKILL)
    elif what == "node":
        host.kill()
        host.boot()
        runs[place] = start(host, host.folder.parent, count=len(struck), shared=shared)
    elif what == "cut":
        before = host.repeats()
        host.cut()
        until(lambda: host.repeats() >= before + chance.randint(1, 6), "it tries in vain")
        host.heal()
    elif what == "slow":
        host.slow()
    elif not host.is_lossy:
        host.disturb()
    return f"{what} on {host.name}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_hosts_that_are_struck_finish_the_job(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    count, shared, log = chance.choice([2, 3, 4]), chance.random() < 0.5, []
    with hosts.standing(tmp_path, count) as struck:
        runs = [start(host, tmp_path, count=count, shared=shared) for host in struck]
        for at in sorted(chance.sample(range(2, 24, 2), chance.choice([1, 2]))):
            until(lambda at=at: steps_done(tmp_path) >= at, f"step {at}", LIMIT_S)
            log.append(f"{strike(chance, struck, runs, shared=shared)} at {at}")
        statuses = [run.end(LIMIT_S) for run in runs]
        assert statuses == [0] * count, (log, [run.err for run in runs])
        assert "done total=465.0" in "".join(run.out for run in runs), log
        clean(runs)
        assert locked(tmp_path) == [], log
