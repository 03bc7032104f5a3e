"""A bash script with the real torchrun: its ranks have the hooks, and a crash is survived."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import until
from runs import example, program, run, saves_and_goes_on, staying

pytestmark = pytest.mark.slow


def bash_script(folder: Path, argv: list[str]) -> list[str]:
    """Make the script of a whole command and return how it is started."""
    options = ["--profile=cpu"]
    command = [sys.executable, "-m", "saferun", "gen-shell", *options, "-o", "run.sh", "--"]
    line = [word for word in argv if word not in options]
    subprocess.run([*command, *line], cwd=folder, check=True)
    return ["bash", str(folder / "run.sh")]


def test_a_rank_that_is_killed_is_survived_and_resumed(tmp_path):
    command = bash_script(tmp_path, example(tmp_path, "SIGKILL"))
    with run(tmp_path, command=command) as job:
        assert job.end() == 0, job.err
        assert "done step=20" in job.out
        assert "resumed at step 10" in job.out
        assert [e["kind"] for e in job.events("ended")] == ["killed-from-outside", "no-failure"]
        job.nothing_lives()
    assert job.messages()[-1] == "saferun: attempt 2 succeeded"
    receipts = [path.read_text().splitlines() for path in job.journal.glob("receipts/*.jsonl")]
    hooks = {json.loads(line).get("hook") for lines in receipts for line in lines}
    assert {"init", "excepthook"} <= hooks


def test_an_interrupted_script_leaves_no_rank(tmp_path):
    command = bash_script(tmp_path, staying(tmp_path))
    with run(tmp_path, command=command) as job:
        until(lambda: set(job.ranks()) == {0, 1}, "both ranks run", 300)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() != 0
        job.nothing_lives()


def test_a_rank_of_a_script_saves_at_a_user_signal_for_as_long_as_it_needs(tmp_path):
    argv = ["--profile=cpu", "--nproc-per-node=2", program("saves_at_a_signal"), str(tmp_path)]
    with run(tmp_path, command=bash_script(tmp_path, argv)) as job:
        saves_and_goes_on(job, tmp_path)
