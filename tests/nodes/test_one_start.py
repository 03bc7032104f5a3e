"""All ranks of an attempt begin at one place, whoever comes back, and with whatever of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
JOB = Path(__file__).parents[1] / "programs" / "nodes" / "resuming_job.py"
STEPS = 40


def weight(steps: int = STEPS) -> str:
    """Return what the job ends with where nothing disturbs it."""
    value = 0.0
    for step in range(1, steps + 1):
        value = round(value * 0.9 + step, 6)
    return f"{value:.4f}"


def options(number: int, count: str, backend: str = "c10d") -> list[str]:
    ours = ["--profile=cpu", f"--nnodes={count}", "--nproc-per-node=1"]
    if backend == "static":
        return [*ours, f"--node-rank={number}", "--master-addr=h1", f"--master-port={PORT}"]
    return [*ours, "--rdzv-backend=c10d", f"--rdzv-endpoint=h1:{PORT}", "--rdzv-id=job"]


def job(out: Path | str, *more: str, name: str = "checkpoint-*.json") -> list[str]:
    args = json.dumps(["--from", "{checkpoint}"])
    ours = [f"--set=retry.resume.checkpoints={out}/{name}", f"--set=retry.resume.args={args}"]
    ours += ["--set=retry.backoff_s=[0, 0]"]
    return [*ours, *more, str(JOB), str(out), str(STEPS), "0.3"]


def saved(out: Path, step: int = 5) -> None:
    until((out / f"checkpoint-{step}.json").exists, f"checkpoint-{step}")


def starts(*outs: Path) -> dict[int, set[int]]:
    """Return the steps at which the ranks of each attempt have begun."""
    found: dict[int, set[int]] = {}
    for path in (path for out in outs for path in out.glob("begun-*")):
        attempt, _, step = map(int, re.findall(r"\d+", path.name))
        found.setdefault(attempt, set()).add(step)
    return found


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts.standing(tmp_path, 3) as found:
        yield found


def ended_right(runs: list[Run], *outs: Path) -> None:
    assert end_all(runs) == [0] * len(runs), [run.err for run in runs]
    weights = re.findall(r"done rank=\d+ weight=([\d.]+)", "".join(run.out for run in runs))
    assert weights == [weight()] * len(runs), [run.err for run in runs]
    assert all(len(steps) == 1 for steps in starts(*outs).values()), starts(*outs)
    clean(runs)


@pytest.mark.parametrize(
    ("backend", "gone", "shared"),
    [("c10d", 2, False), ("c10d", 0, True), ("static", 1, True), ("static", 0, False)],
)
def test_a_node_that_comes_back_begins_where_the_others_do(
    three: list[Host], tmp_path: Path, backend: str, gone: int, *, shared: bool
):
    out = tmp_path / "out"
    given = [f"--run-dir={tmp_path / 'runs'}"] if shared else []
    lines = [[*options(n, "3", backend), *given, *job(out)] for n in range(3)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=True)]
    saved(out)
    three[gone].kill()
    three[gone].boot()
    runs[gone] = three[gone].start(*lines[gone])
    ended_right(runs, out)
