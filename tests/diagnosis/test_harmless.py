"""What programs print without harm decides nothing: by itself, before a failure, or behind one.

records/harmless has lines of libraries, launchers and shells as jobs print them that go on
(start.txt) or have failed for another reason (end.txt), shortened.
"""

from __future__ import annotations

from job_logs import RECORDS, diagnose, table, wrongly_diagnosed

START = (RECORDS / "harmless" / "start.txt").read_text()
END = (RECORDS / "harmless" / "end.txt").read_text()
STEPS = "".join(f"step {step} loss 2.{step}\n" for step in range(30))
SAYS_NOTHING = ("unknown", "child-failed-no-root")
# Known by the last lines of a log without a step, and by nothing else.
BY_ITS_END = "nccl-p2p-hang"
KINDS = [row for row in table("kinds") if isinstance(row["log"], str) and row["kind"] != BY_ITS_END]


def test_a_line_after_which_the_job_made_steps_does_not_decide():
    found = {line: diagnose(line + "\n" + STEPS, exit_code=1).kind for line in START.splitlines()}
    assert {line: kind for line, kind in found.items() if kind not in SAYS_NOTHING} == {}


def test_the_same_in_another_stream_which_stands_behind_the_steps():
    """So saferun reads a live run: stdout, and then stderr."""
    login = "wandb: Currently logged in as: me. Use `wandb login --relogin` to force relogin"
    address = (
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [h]:29500 "
        "(errno: 97 - Address family not supported by protocol)."
    )
    rings = "h:12:34 [0] NCCL INFO Connected all rings"
    found = [diagnose(f"{STEPS}{line}\n", exit_code=1).kind for line in (login, address, rings)]
    assert set(found) <= set(SAYS_NOTHING)


def test_a_failure_keeps_its_kind_behind_all_that_is_said_before_it():
    assert wrongly_diagnosed([{**row, "log": START + STEPS + row["log"]} for row in KINDS]) == []


def test_a_failure_keeps_its_kind_before_all_that_is_said_after_it():
    assert wrongly_diagnosed([{**row, "log": f"{row['log']}\n{END}"} for row in KINDS]) == []


def test_a_tracker_beside_an_exception_makes_no_server_of_it():
    raised = 'Traceback (most recent call last):\n  File "/w/t.py", line 3, in read\n'
    log = raised + "TimeoutError: read timed out\n" + END
    assert diagnose(log, exit_code=1).verdict == "stop-user"


def test_the_failed_rank_is_not_outlived_by_the_steps_of_another():
    lost = "[rank1]: RuntimeError: Connection closed by peer [10.0.0.1]:2\n"
    log = "[rank3]: RuntimeError: CUDA error: invalid device ordinal\n" + STEPS + lost
    assert diagnose(log, exit_code=1).kind == "cuda-invalid-device-ordinal"
