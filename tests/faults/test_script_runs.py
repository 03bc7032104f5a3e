"""A bash script with the real torchrun: its ranks have the hooks, and a crash is survived."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import example, run


@pytest.mark.slow
def test_a_rank_that_is_killed_is_survived_and_resumed(tmp_path):
    line = [word for word in example(tmp_path, "SIGKILL") if word != "--profile=cpu"]
    make = [sys.executable, "-m", "saferun", "gen-shell", "--profile=cpu", "-o", "run.sh", "--"]
    subprocess.run([*make, *line], cwd=tmp_path, check=True)
    with run(tmp_path, command=["bash", str(tmp_path / "run.sh")]) as job:
        assert job.end() == 0, job.err
        assert "done step=20" in job.out
        assert "resumed at step 10" in job.out
        assert [e["kind"] for e in job.events("ended")] == ["killed-from-outside", "no-failure"]
        job.nothing_lives()
    assert job.messages()[-1] == "saferun: attempt 2 succeeded"
    receipts = [path.read_text().splitlines() for path in job.journal.glob("receipts/*.jsonl")]
    hooks = {json.loads(line).get("hook") for lines in receipts for line in lines}
    assert {"init", "excepthook"} <= hooks
