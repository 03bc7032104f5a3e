"""A fault of ours in torchrun's agent is one line, and the job goes on as without us."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT

PROGRAM = ROOT / "tests/programs/nodes/faulty_agent.py"
FUNCTIONS = [
    "node_joining.Joining.begin",
    "node_joining.Joining._look",
    "node_agent.Party._meet",
    "node_agent.Party._say_root",
    "node_agent.Party._note_shutdown",
    "node_agent.Party._await_all",
    "node_agent.Party._ended",
    "node_agent.Party._is_early",
    "node_watch.Beats.silent",
    "node_watch.NodeWatch.start",
    "nodes.agree",
]


@pytest.mark.parametrize(
    "function",
    [
        "node_joining.Joining.watch",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS),
    ],
)
def test_a_fault_of_ours_is_one_line_and_the_job_succeeds_at_attempt_1(tmp_path, function):
    (tmp_path / "job.py").write_text("print('done')\n")
    options = [
        "--nnodes=1",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), function, str(tmp_path), *options, "job.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("saferun: ")]
    assert [line.endswith(": LookupError: planted; the job goes on") for line in ours] == [True], (
        done.stderr
    )
    assert "Traceback" not in done.stderr
