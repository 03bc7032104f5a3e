"""Step markers do what the profile says, measured on the step counter that cudagraph trees read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Forks, Job
from repo import source


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Callable[..., Job]:
    """Marks steps in ranks under a setting of the hook; 0 ranks are one process alone."""

    def run(setting: str, ranks: int, group: str) -> Job:
        return forks.run(
            tmp_path,
            source("inject/mark_steps"),
            ranks=ranks,
            order={"mode": "off"},
            cudagraph_markers=setting,
            environ={"GROUP": group},
        )

    return run


@pytest.mark.parametrize(
    ("setting", "ranks", "steps"),
    [
        pytest.param("keep", 0, 4, marks=pytest.mark.slow),
        pytest.param("keep", 2, 4, marks=pytest.mark.slow),
        pytest.param("off", 0, 0, marks=pytest.mark.slow),
        pytest.param("off", 1, 0, marks=pytest.mark.slow),
        ("off-when-distributed", 0, 4),
        pytest.param("off-when-distributed", 1, 0, marks=pytest.mark.slow),
        ("off-when-distributed", 2, 0),
    ],
)
@pytest.mark.slow
def test_markers_count_steps_only_where_the_profile_lets_them(
    run: Callable[..., Job], setting: str, ranks: int, steps: int
) -> None:
    job = run(setting, ranks, "made" if ranks else "")
    assert job.out.splitlines() == [str(steps)] * max(1, ranks), job.err
    observed = [line for line in job.hook("cudagraph_markers") if line["outcome"] == "observed"]
    assert sorted(line["rank"] for line in observed if ranks) == [
        *range(ranks if setting != "keep" else 0)
    ]
    assert all(line["effective"] == {"marks": steps > 0} for line in observed)


def test_markers_come_back_when_the_group_is_gone(run: Callable[..., Job]) -> None:
    """And this process is no rank of several."""
    assert run("off-when-distributed", 1, "gone").out == "4\n"
