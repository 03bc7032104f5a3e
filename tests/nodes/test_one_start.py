"""All ranks of an attempt begin at one place, whoever comes back, and with whatever of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hosts
import pytest
from helpers import until
from hosts import Host, clean, end_all, meeting
from node_faults import exact_job
from runs import Run

pytestmark = [
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()),
    pytest.mark.slow,
]
STEPS = 40


def job(out: Path | str, *more: str, steps: int = STEPS) -> list[str]:
    """Return a job whose weights tell whether all its ranks have always trained from one place."""
    args = json.dumps(["--from", "{checkpoint}"])
    ours = [
        f"--set=retry.resume.checkpoints={out}/step-*.zip",
        f"--set=retry.resume.args={args}",
        "--set=retry.backoff_s=[0, 0]",
    ]
    places = [f"--out={out}", f"--saves={out}", "--saver=each"]
    return [*ours, *more, exact_job.__file__, *places, f"--steps={steps}", "--step-s=0.3"]


def saved(out: Path, step: int = 5) -> None:
    until((out / f"step-{step}.zip").exists, f"step-{step}.zip")


def audit(out: Path, event: str) -> list[dict[str, Any]]:
    """Return what the ranks have written down of an event."""
    lines = (out / "audit").read_text().splitlines()
    return [facts for facts in map(json.loads, lines) if facts["event"] == event]


def starts(out: Path) -> dict[int, set[int]]:
    """Return the steps at which the ranks of each attempt have begun."""
    found: dict[int, set[int]] = {}
    for facts in audit(out, "begin"):
        found.setdefault(int(facts["attempt"]), set()).add(facts["step"])
    return found


def ended_right(runs: list[Run], out: Path, steps: int = STEPS) -> None:
    assert end_all(runs) == [0] * len(runs), [run.err for run in runs]
    weights = [facts["weights"] for facts in audit(out, "end")]
    assert weights == [exact_job.trained(steps)] * len(runs), [run.err for run in runs]
    assert all(len(begun) == 1 for begun in starts(out).values()), starts(out)
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
    lines = [[*meeting(n, "3", backend), *given, *job(out)] for n in range(3)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=True)]
    saved(out)
    three[gone].kill()
    three[gone].boot()
    runs[gone] = three[gone].start(*lines[gone])
    ended_right(runs, out)


def test_a_node_that_does_not_see_the_checkpoint_ends_the_run_by_name(
    three: list[Host], tmp_path: Path
):
    """Each node saves on its own disk, and what lies there when h3 comes back is no proof."""
    lines = [[*meeting(n, "3"), *job("out")] for n in range(3)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=True)]
    saved(tmp_path / "h3" / "out")
    three[2].kill()
    three[2].boot()
    runs[2] = three[2].start(*lines[2])
    assert end_all(runs) == [78, 78, 78], [run.err for run in runs]
    for run in runs:
        assert "goes on from out/step-5.zip of h1, h2, which is not there on h3" in run.err
        assert f"step {STEPS} " not in run.out
    clean(runs)


def test_another_way_to_resume_on_one_node_is_refused_by_name(three: list[Host], tmp_path: Path):
    out = tmp_path / "out"
    other = '--set=retry.resume.args=["--resume", "{checkpoint}"]'
    lines = [[*meeting(n, "2"), *job(out, *[other] * n)] for n in range(2)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=False)]
    assert end_all(runs) == [78, 78], [run.err for run in runs]
    for run in runs:
        assert "retry.resume differs: " in run.err
        assert '"--from"' in run.err.partition("retry.resume differs: ")[2].partition(" on h1")[0]
    clean(runs)


def test_an_elastic_run_takes_in_a_node_that_returns_while_it_trains(
    three: list[Host], tmp_path: Path
):
    out = tmp_path / "out"
    line = [*meeting(0, "1:2"), "--rdzv-conf=last_call_timeout=3", *job(out, steps=300)]
    runs = [host.start(*line) for host in three[:2]]
    saved(out)
    three[1].kill()
    until(lambda: any(begun > 1 for begun in starts(out)), "h1 goes on alone")
    three[1].boot()
    runs[1] = three[1].start(*line)
    ended_right(runs, out, steps=300)
    assert len(runs[0].events("nodes")[-1]["hosts"]) == 2


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_node_that_is_gone_for_good_is_named_by_all_others(
    three: list[Host], tmp_path: Path, backend: str
):
    out = tmp_path / "out"
    lines = [[*meeting(n, "3", backend), *job(out, "--set=retry.rejoin_s=15")] for n in range(3)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=True)]
    saved(out)
    three[1].kill()
    assert [runs[0].end(), runs[2].end()] == [1, 1]
    for run in (runs[0], runs[2]):
        assert "saferun: the run failed: node-lost, host h2" in run.err
        assert "not tried again: h2 did not come back in time (retry.rejoin_s: 15 s)" in run.err
    clean([runs[0], runs[2]])
