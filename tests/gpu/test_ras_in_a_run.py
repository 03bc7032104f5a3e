"""A whole run whose ranks are silent asks the RAS that they have, and says what it counts."""

import sys

import pytest
from ras_server import of_ranks, ras
from runs import Run, program, run


@pytest.mark.slow
@pytest.mark.parametrize(("state", "agrees"), [("scheduled", True), ("completed", False)])
def test_a_rank_that_is_gone_by_ras_and_the_recorder_ends_the_attempt_early(machine, state, agrees):
    """It has left with status 0, so that torchrun waits for the others. RAS alone ends nothing."""
    argv = ["--profile=h100", "--set=watch.silence_s=30", "--set=watch.mode=end", "--retries=0"]
    fast = [sys.executable, program("fast_watch")]  # 120 s are 12
    jobs: list[Run] = []
    pid = machine.folder / "pid"

    def answer(_: bytes) -> bytes:
        gone = {"rank": 0, "host": "h", "pid": int(pid.read_text(encoding="utf-8"))}
        gone["status"] = {"considered_dead": True}
        return of_ranks({n: (pid, 41) for n, pid in jobs[0].ranks().items() if n}, gone)

    with ras(answer) as address:
        environ = {**machine.environ, "NCCL_RAS_ADDR": address}
        script = ["--nproc-per-node=3", program("left_alone"), state, str(pid)]
        with run(machine.folder, *argv, *script, env=environ, command=fast) as job:
            jobs.append(job)
            assert job.end() != 0
            job.nothing_lives()
            (hang,), (ended,) = job.events("hang"), job.events("ended")
            (stall,) = job.events("stall")
    assert (hang["silent_s"] < 30) == agrees
    assert (ended["kind"], ended["root_rank"], ended["ended_by"]) == ("hang", 0, "hang")
    assert ("rank 0: dead, or gives no answer" in ended["root_line"]) == agrees
    assert stall["line"].startswith("rank 0 has ended, 2 ranks wait for it in ")
