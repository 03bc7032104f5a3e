"""Step markers do what the profile says, measured on the step counter that cudagraph trees read."""

import re
from pathlib import Path

import pytest
from ranks import WHEN_DISTRIBUTED, ForkServers, Job, compiling
from repo import source


def marked(forks: ForkServers, folder: Path, setting: str, ranks: int, group: str) -> Job:
    """Mark steps in ranks under a setting of the hook; 0 ranks are one process alone."""
    hooks = {**compiling(WHEN_DISTRIBUTED), "cudagraph_markers": setting}
    script = source("inject/mark_steps")
    return forks.run(folder, script, ranks=ranks, environ={"GROUP": group}, **hooks)


@pytest.mark.parametrize(
    ("setting", "ranks", "steps"),
    [
        *(("keep", 0, 4), ("keep", 2, 4), ("off", 0, 0), ("off", 1, 0)),
        *(("off-when-distributed", number, 0 if number else 4) for number in (0, 1, 2)),
    ],
)
@pytest.mark.slow
def test_markers_count_steps_only_where_the_profile_lets_them(
    forks, tmp_path, setting, ranks, steps
):
    job = marked(forks, tmp_path, setting, ranks, "made" if ranks else "")
    assert re.findall(r"steps=(\d+);", job.out) == [str(steps)] * max(1, ranks), job.err
    observed = [line for line in job.hook("cudagraph_markers") if line["outcome"] == "observed"]
    assert sorted(line["rank"] for line in observed if ranks) == [
        *range(ranks if setting != "keep" else 0)
    ]
    assert all(line["effective"] == {"marks": steps > 0} for line in observed)


def test_markers_come_back_when_the_group_is_gone(forks, tmp_path):
    """And this process is no rank of several."""
    assert marked(forks, tmp_path, "off-when-distributed", 1, "gone").out == "steps=4;\n"
