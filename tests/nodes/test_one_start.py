"""All ranks of an attempt begin at one place, whoever comes back, and with whatever of its own."""

import json
import re
from pathlib import Path

import pytest
from helpers import until
from hosts import clean, end_all, meeting
from rights import needs
from runs import Run

pytestmark = [needs("make networks"), pytest.mark.slow]
JOB = Path(__file__).parents[1] / "programs" / "nodes" / "resuming_job.py"
STEPS = 40


def weight(steps: int = STEPS) -> str:
    """Return what the job ends with where nothing disturbs it."""
    value = 0.0
    for step in range(1, steps + 1):
        value = round(value * 0.9 + step, 6)
    return f"{value:.4f}"


def job(out: Path | str, *more: str, steps: int = STEPS) -> list[str]:
    args = json.dumps(["--from", "{checkpoint}"])
    ours = [
        f"--set=retry.resume.checkpoints={out}/checkpoint-*.json",
        f"--set=retry.resume.args={args}",
    ]
    ours += ["--set=retry.backoff_s=[0, 0]"]
    return [*ours, *more, str(JOB), str(out), str(steps), "0.3"]


def saved(out: Path, step: int = 5) -> None:
    until((out / f"checkpoint-{step}.json").exists, f"checkpoint-{step}")


def starts(*outs: Path) -> dict[int, set[int]]:
    """Return the steps at which the ranks of each attempt have begun."""
    found: dict[int, set[int]] = {}
    for path in (path for out in outs for path in out.glob("begun-*")):
        attempt, _, step = map(int, re.findall(r"\d+", path.name))
        found.setdefault(attempt, set()).add(step)
    return found


def ended_right(runs: list[Run], *outs: Path, steps: int = STEPS) -> None:
    assert end_all(runs) == [0] * len(runs), [run.err for run in runs]
    weights = re.findall(r"done rank=\d+ weight=([\d.]+)", "".join(run.out for run in runs))
    assert weights == [weight(steps)] * len(runs), [run.err for run in runs]
    assert all(len(begun) == 1 for begun in starts(*outs).values()), starts(*outs)
    clean(runs)


@pytest.mark.parametrize(
    ("backend", "gone", "shared"),
    [("c10d", 2, False), ("c10d", 0, True), ("static", 1, True), ("static", 0, False)],
)
def test_a_node_that_comes_back_begins_where_the_others_do(
    three, tmp_path, backend, gone, *, shared
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


def test_a_node_that_does_not_see_the_checkpoint_ends_the_run_by_name(three, tmp_path):
    """Each node saves on its own disk, and what lies there when h3 comes back is no proof."""
    lines = [[*meeting(n, "3"), *job("out")] for n in range(3)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=True)]
    saved(tmp_path / "h3" / "out")
    three[2].kill()
    three[2].boot()
    runs[2] = three[2].start(*lines[2])
    assert end_all(runs) == [78, 78, 78], [run.err for run in runs]
    for run in runs:
        assert "goes on from out/checkpoint-5.json of h1, h2, which is not there on h3" in run.err
        assert "done" not in run.out
    clean(runs)


def test_another_way_to_resume_on_one_node_is_refused_by_name(three, tmp_path):
    out = tmp_path / "out"
    other = '--set=retry.resume.args=["--resume", "{checkpoint}"]'
    lines = [[*meeting(n, "2"), *job(out, *[other] * n)] for n in range(2)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=False)]
    assert end_all(runs) == [78, 78], [run.err for run in runs]
    for run in runs:
        assert "retry.resume differs: " in run.err
        assert '"--from"' in run.err.partition("retry.resume differs: ")[2].partition(" on h1")[0]
    clean(runs)


def test_an_elastic_run_takes_in_a_node_that_returns_while_it_trains(three, tmp_path):
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
def test_a_node_that_is_gone_for_good_is_named_by_all_others(three, tmp_path, backend):
    out = tmp_path / "out"
    lines = [[*meeting(n, "3", backend), *job(out, "--set=retry.rejoin_s=15")] for n in range(3)]
    runs = [host.start(*line) for host, line in zip(three, lines, strict=True)]
    saved(out)
    three[1].kill()
    assert [runs[0].end(), runs[2].end()] == [1, 1]
    for run in (runs[0], runs[2]):
        assert "(node-lost, host h2)" in run.err
        assert "not tried again: h2 did not come back in time (retry.rejoin_s: 15 s)" in run.err
    clean([runs[0], runs[2]])
