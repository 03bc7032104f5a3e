"""A fault of ours in torchrun's agent is one line, and the job goes on as without us."""

import os
import subprocess
import sys

import pytest
from cases import slow
from helpers import ROOT

PROGRAM = ROOT / "tests/programs/nodes/faulty_agent.py"
FUNCTIONS = [
    "node_joining.Joining.begin",
    "node_joining.Joining._look_at_state",
    "node_agent.NodeParticipant._meet",
    "node_agent.NodeParticipant._say_root",
    "node_agent.NodeParticipant._note_shutdown",
    "node_agent.NodeParticipant._await_all",
    "node_agent.NodeParticipant._ended",
    "node_agent.NodeParticipant._is_early",
    "node_watch.Beats.silent",
    "node_watch.NodeWatch.start",
    "node_agreement.agree",
]


@pytest.mark.parametrize("function", ["node_joining.Joining.watch", *slow(*FUNCTIONS)])
def test_a_fault_of_ours_is_one_line_and_the_job_succeeds_at_attempt_1(tmp_path, function):
    done = run(tmp_path, function, "print('done')\n")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("saferun: ")]
    assert [line.endswith(": LookupError: planted; the job goes on") for line in ours] == [True], (
        done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("job", "status"), [("print('done')\n", 0), ("exit(3)\n", 1)])
def test_a_rendezvous_that_cannot_be_closed_does_not_hold_the_end(tmp_path, job, status):
    """torch would wait for its host until the kernel gives up: 924 s."""
    done = run(tmp_path, "close", job)
    assert done.returncode == status
    assert "saferun: the host of the rendezvous has not answered for 5 s at the end" in done.stderr


def run(folder, function, job):
    """Run a job of one rank below an agent that has a fault."""
    (folder / "job.py").write_text(job, encoding="utf-8")
    options = [
        "--nnodes=1",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    return subprocess.run(
        [sys.executable, str(PROGRAM), function, str(folder), *options, "job.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
