"""What programs print without harm decides nothing: by itself, before a failure, or behind one.

records/harmless has lines of libraries, launchers and shells as jobs print them that go on
(start.txt) or have failed for another reason (end.txt), shortened. notices.txt has notices with
words of errors, with a blank line between them, that jobs print early and outlive.
"""

import itertools

import pytest
from cases import check_cases, slow
from job_logs import RECORDS, SUMMARY, TIMEOUT, TRACEBACK, diagnose, table, wrongly_diagnosed

START = (RECORDS / "harmless" / "start.txt").read_text(encoding="utf-8")
END = (RECORDS / "harmless" / "end.txt").read_text(encoding="utf-8")
STEPS = "".join(f"step {step} loss 2.{step}\n" for step in range(30))
SAYS_NOTHING = ("unknown", "child-failed-no-root")
# Known by the last lines of a log without a step, and by nothing else.
BY_ITS_END = "nccl-p2p-hang"
KINDS = [row for row in table("kinds") if isinstance(row["log"], str) and row["kind"] != BY_ITS_END]


def test_a_line_after_which_the_job_made_steps_does_not_decide():
    found = {line: diagnose(line + "\n" + STEPS, exit_code=1).kind for line in START.splitlines()}
    assert {line: kind for line, kind in found.items() if kind not in SAYS_NOTHING} == {}


def test_a_harmless_line_of_stderr_that_is_read_behind_all_steps_does_not_decide():
    """So saferun reads a live run: stdout, and then stderr."""
    login = "wandb: Currently logged in as: me. Use `wandb login --relogin` to force relogin"
    address = (
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [h]:29500 "
        "(errno: 97 - Address family not supported by protocol)."
    )
    rings = "h:12:34 [0] NCCL INFO Connected all rings"
    found = [diagnose(f"{STEPS}{line}\n", exit_code=1).kind for line in (login, address, rings)]
    assert set(found) <= set(SAYS_NOTHING)


@pytest.mark.parametrize("parts", [5, *slow(1)])
def test_a_failure_keeps_its_kind_behind_all_that_is_said_before_it(parts):
    lines = START.splitlines(keepends=True)
    said = itertools.cycle("".join(lines[part::parts]) for part in range(parts))
    rows = [{**row, "log": next(said) + STEPS + row["log"]} for row in KINDS]
    assert wrongly_diagnosed(rows) == []


def test_a_failure_keeps_its_kind_before_all_that_is_said_after_it():
    assert wrongly_diagnosed([{**row, "log": f"{row['log']}\n{END}"} for row in KINDS]) == []


def test_a_tracker_beside_an_exception_makes_no_server_of_it():
    raised = f"{TRACEBACK}TimeoutError: the loader had no batch\n"
    assert diagnose(raised + END, exit_code=1).verdict == "stop-user"


def test_the_failed_rank_is_not_outlived_by_the_steps_of_another():
    lost = "[rank1]: RuntimeError: Connection closed by peer [10.0.0.1]:2\n"
    log = "[rank3]: RuntimeError: CUDA error: invalid device ordinal\n" + STEPS + lost
    assert diagnose(log, exit_code=1).kind == "cuda-invalid-device-ordinal"


NOTICES = (RECORDS / "harmless" / "notices.txt").read_text(encoding="utf-8").split("\n\n")
LOST = "Connection closed by peer [10.0.0.2]:4123"
UNAVAILABLE = "503 Server Error for url: https://h.co/x"
LAUNCH = "unspecified launch failure"
ENDS = {
    "a crash": (SUMMARY.format(rank=1, code=-11), "segfault"),
    "a kill": (SUMMARY.format(rank=1, code=-9), "host-oom-killed"),
    "an abort": (SUMMARY.format(rank=1, code=-6), "abort-unknown"),
    "a request to end": (SUMMARY.format(rank=1, code=-15), "sigterm-preempted"),
    "no word": (SUMMARY.format(rank=1, code=1), "child-failed-no-root"),
    "nothing at all": ("", "unknown"),
    "a time-out": (TIMEOUT + "\n" + SUMMARY.format(rank=1, code=-6), "nccl-timeout"),
    "a lost peer": (f"{TRACEBACK}RuntimeError: [gloo/pair.cc:534] {LOST}\n", "peer-lost"),
    "a server": (f"{TRACEBACK}requests.exceptions.HTTPError: {UNAVAILABLE}\n", "hub-unavailable"),
    "a kernel": (f"{TRACEBACK}RuntimeError: CUDA error: {LAUNCH}\n", "cuda-launch-failure"),
    "an exception": (f"{TRACEBACK}KeyError: 'label'\n", "user-exception"),
}
PROGRESS = {
    "lines": f"step {{at}} loss 2.5 {'|':>60}",
    "a rank's lines": "[default0]:step {at} loss 2.5 tok/s 1234",
    "bars": "Training:  4%|#         | {at}/9000 [10:00<10:00,  1.00it/s]",
    "dictionaries": "{{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': {part:.2f}}}",
    "epochs": "Epoch {at}/900 - loss 2.5",
    "trials": "Trial {at} finished with value: 2.5 and parameters: {{'x': 1}}.",
    "places": "[{at}/9000] loss 2.5",
    "Keras's bars": "{at}/9000 ━━━━━━━━━━ 1:20 91ms/step - loss: 2.5",
    "Megatron's": "iteration {at:8d}/ 9000 | elapsed time per iteration (ms): 131.0 | loss: 2.5",
}


def progress_lines(progress: str, first: int, last: int) -> str:
    return "".join(
        PROGRESS[progress].format(at=at, part=at / 100) + "\n" for at in range(first, last)
    )


def check(log: str, kind: str) -> None:
    assert diagnose(log).kind == kind


@pytest.mark.parametrize("count", [2, *slow(len(ENDS))])
def test_a_notice_that_the_job_outlived_does_not_change_what_its_end_means(count):
    steps, ends = progress_lines("lines", 0, 110), itertools.cycle(ENDS.items())
    check_cases(
        {
            f"{notice}, {end}": (f"{notice}\n{steps}{last}", kind)
            for notice in NOTICES
            for end, (last, kind) in itertools.islice(ends, count)
        },
        check,
    )


def test_a_job_outlives_a_notice_however_it_shows_its_progress():
    shown = zip(NOTICES, itertools.cycle(PROGRESS), strict=False)
    last, kind = ENDS["a crash"]
    check_cases(
        {at: (f"{notice}\n{progress_lines(at, 1, 300)}{last}", kind) for notice, at in shown}, check
    )


def test_a_notice_that_comes_all_the_time_is_outlived_by_its_first_times():
    often = (
        "CUDA out of memory at this batch, the next one is tried",
        "h:12:34 [0] transport/net_ib.cc:99 NCCL WARN NET/IB : Got completion from peer with error",
        "No module named 'flash_attn'",
        "[rank0]: RuntimeError: Triton Error [CUDA]: invalid argument, torch's kernel is used",
    )
    last, kind = ENDS["a crash"]
    parts = [progress_lines("lines", at, at + 50) for at in range(0, 300, 50)]
    check_cases({one: (f"{one}\n".join([*parts, last]), kind) for one in often}, check)


def test_what_comes_again_at_the_end_is_the_cause():
    full = f"{TRACEBACK}OSError: [Errno 28] No space left on device\n"
    steps = progress_lines("lines", 0, 300)
    assert diagnose(full + steps + full).kind == "disk-full"
    assert diagnose(full + steps + SUMMARY.format(rank=1, code=-11)).kind == "segfault"


def test_steps_from_the_buffer_of_the_process_that_failed_do_not_outlive_its_exception():
    raised = f"{TRACEBACK}KeyError: 'label'\n"
    ended = SUMMARY.format(rank=1, code=1)
    assert diagnose(raised + progress_lines("lines", 0, 90) + ended).kind == "user-exception"
    assert diagnose(raised + progress_lines("lines", 0, 110) + ended).kind == "child-failed-no-root"
