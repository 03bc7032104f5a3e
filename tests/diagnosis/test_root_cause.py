"""Which one of several explanations is the root cause, and which ones are echoes of it."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest
from job_logs import (
    FULL_CARD,
    SUMMARY,
    TIMEOUT,
    TRACEBACK,
    diagnose,
    output,
    table,
    wrongly_diagnosed,
)

from saferun.diagnosis.evidence import RankFailure

# --- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("echo_first", [False, True], ids=["after it", "before it"])
def test_an_exception_outweighs_the_aborts_of_the_other_ranks(echo_first):
    cause = "[rank3]: " + (TRACEBACK + "KeyError: 'img'").replace("\n", "\n[rank3]: ")
    log = "\n".join((TIMEOUT, cause) if echo_first else (cause, TIMEOUT))
    found = diagnose(log)
    assert (found.kind, found.root_rank) == ("user-exception", 3)
    assert found.root_line == "[rank3]: KeyError: 'img'"


def test_the_line_is_the_exception_and_not_a_record_that_mentions_it():
    record = f"[W 2026-11-22] Trial 3 failed with {'x' * 300} because of: KeyError(\"'img'\")."
    found = diagnose(f"{record}\n{TRACEBACK}KeyError: 'img'\n")
    assert found.root_line == "KeyError: 'img'"
    assert diagnose(f"{record}\nall went on\n", exit_code=1).root_line == record


def test_the_line_of_an_exceptions_message_that_states_the_cause_is_shown():
    line = "/e/flash.so: undefined symbol: _ZN3"
    assert diagnose(f"{TRACEBACK}ImportError: it cannot be loaded\n{line}\n").root_line == line


def test_a_rank_that_ended_silently_outweighs_what_the_others_saw():
    echo = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:45\n"
    found = diagnose(echo + SUMMARY.format(rank=1, code=3))
    assert (found.verdict, found.root_rank) == ("stop-user", 1)


def test_among_equals_the_rank_that_the_launcher_names_wins():
    lines = [f"[rank{r}]: FileNotFoundError: [Errno 2] No such file: 'shard{r}'" for r in (1, 2)]
    found = diagnose("\n".join(lines) + "\n" + SUMMARY.format(rank=2, code=1))
    assert (found.root_rank, "shard2" in found.root_line) == (2, True)


def test_the_earliest_error_file_wins_over_later_ones_and_over_echoes():
    late, early = (
        RankFailure(rank=rank, time_s=at, traceback=f"{TRACEBACK}IndexError: {at}")
        for rank, at in ((1, 20.0), (4, 10.5))
    )
    found = diagnose(TIMEOUT, failures=(late, early))
    assert (found.kind, found.root_rank) == ("user-exception", 4)
    assert found.root_line == "IndexError: 10.5"


def test_what_an_error_file_states_needs_no_name_of_an_exception():
    """Whatever it is called, and where its traceback is cut, it is what the rank has raised."""
    cut = 'Traceback (most recent call last):\n  File "/v/torch/nn/x.py", line 9, in f\n'
    for traceback in ("", cut):
        stated = RankFailure(rank=3, type="Boom", message="Boom: bad batch", traceback=traceback)
        found = diagnose(TIMEOUT, failures=(stated,))
        assert (found.kind, found.root_line) == ("user-exception", "Boom: bad batch")
        assert found.decided_by == ("error file of rank 3",)


def test_an_error_file_is_read_apart_from_the_log_and_from_other_files():
    sizes = RankFailure(time_s=1.0, traceback=TRACEBACK + "ValueError: the sizes are:")
    other = RankFailure(time_s=2.0, traceback="  of a later one\n" + TRACEBACK + "KeyError: 'x'")
    for failures, log in (((sizes,), "step 1 loss 2\n"), ((sizes, other), "")):
        assert diagnose(log, failures=failures).root_line == "ValueError: the sizes are:"


def test_an_exception_of_an_error_file_means_what_it_means_beside_the_log():
    raised = TRACEBACK + "tensorflow.errors.UnavailableError: Graph execution error:\n"
    failures = (RankFailure(rank=1, traceback=raised),)
    lost = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats)\n"
    assert diagnose("", failures=failures).kind != "peer-lost"
    assert diagnose(lost, failures=failures).kind == "peer-lost"


PEER = (
    "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer\n"
)


@pytest.mark.parametrize(
    ("echo", "code", "kind"),
    [
        (PEER, -6, "abort-unknown"),
        (PEER, -15, "sigterm-preempted"),
        (PEER, 1, "child-failed-no-root"),
        (TIMEOUT + "\n", -6, "nccl-timeout"),
    ],
)
def test_the_rank_that_ended_first_explains_what_its_peers_saw(echo, code, kind):
    assert diagnose(echo + SUMMARY.format(rank=1, code=code)).kind == kind


# --- what the job survived -----------------------------------------------------------------------


INDEX = f"{TRACEBACK}IndexError: list index out of range\n"
KEY = f"{TRACEBACK}KeyError: 'x'\n"
OPENED = f"{TRACEBACK}PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'\n"
PORT = f"{TRACEBACK}RuntimeError: Address already in use\n"
READ = f"{TRACEBACK}requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co'): Read timed out.\n"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
ASKED = "api.py:1] Received {} death signal, shutting down workers\n"
BAR = "".join(f" 1%| | {n}/400 [00:0{n}<07:00]\n" for n in range(4))
OF_1 = "".join(f"[rank1]: {line}\n" for line in OPENED.splitlines())
CRASHED = "failed (exitcode: -11) local_rank: 0 (pid: 28773)"
# A log, and its kind.
SURVIVED = {
    "an exception behind a full card": (FULL_CARD + "\n" + INDEX, "cuda-oom"),
    "behind its stack": (f"{FULL_CARD}\n" + "frame #3: at::x() + 0x4\n" * 30 + INDEX, "cuda-oom"),
    "behind thirty steps": (f"{FULL_CARD}\n{output(30)}{INDEX}", "user-exception"),
    "the first of two signals is the one that asked": (
        ASKED.format(15) + ASKED.format(2) + KEY, "sigterm-preempted",
    ),
    "an exception before a failure that stops": (
        f"{KEY}{output(30)}{TRACEBACK}{FULL_CARD}\n", "cuda-oom",
    ),
    "a time-out that was handled": (READ + output(20) + KEY, "user-exception"),
    "no step behind an exception": (OPENED + PORT, "user-exception"),
    "two steps": (OPENED + output(2) + PORT, "user-exception"),
    "the same step": (OPENED + "step 7 loss 2\n" * 9 + PORT, "user-exception"),
    "no steps": (OPENED + "preparing\n" * 9 + PORT, "user-exception"),
    "three steps": (OPENED + output(3) + PORT, "port-in-use"),
    "a progress bar": (OPENED + BAR + PORT, "port-in-use"),
    # A rank's stdout is written at its exit where it is a file: steps may follow its exception.
    "steps before an echo": (OPENED + output(30) + TIMEOUT, "user-exception"),
    "steps before a crash": (OPENED + output(30) + CRASHED, "user-exception"),
    "steps of another rank": (OF_1 + output(9, "[rank0]: step {} loss 2.5") + PORT, "user-exception"),
    "thousands of lines": (ILLEGAL + output(5000) + TIMEOUT, "nccl-timeout"),
    "a crash at exit": (f"{INDEX}Segmentation fault (core dumped)", "user-exception"),
    "an illegal instruction at exit": (f"{INDEX}Illegal instruction (core dumped)", "user-exception"),
}  # fmt: skip


@pytest.mark.parametrize(("log", "kind"), SURVIVED.values(), ids=SURVIVED)
def test_what_the_job_survived_is_not_the_root(log, kind):
    found = diagnose(log, exit_code=139 if "core dumped" in log else None)
    assert found.kind == kind
    assert "KeyError" in found.root_line or READ not in log


def test_a_warning_explains_the_crash_that_only_the_exit_status_shows():
    log = "NVIDIA X is not compatible with the current PyTorch installation.\n"
    assert diagnose(log, exit_code=-11).kind == "cuda-no-kernel-image"


@pytest.mark.parametrize("handled", ["", OPENED], ids=["alone", "beside a handled one"])
def test_an_error_file_is_of_the_exception_that_ended_its_rank(handled):
    filed = (RankFailure(traceback=TRACEBACK + "KeyError: 'x'"),)
    found = diagnose(handled + output(30) + PORT, failures=filed)
    assert (found.kind, found.root_line) == ("user-exception", "KeyError: 'x'")


# --- output beside a failure -----------------------------------------------------------------------

# Lines that look fatal and are not.
HARMLESS = [
    "x.py:1: FutureWarning: The module torch.distributed.launch is deprecated and will be removed in future. Use torchrun.",
    "[rank0]:[W1011 ProcessGroupNCCL.cpp:1250] Warning: WARNING: destroy_process_group() was not called before program exit",
    "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
    "_multiprocessing_helpers.py:46: UserWarning: [Errno 28] No space left on device.  joblib will operate in serial mode",
    "W0920 torch/distributed/elastic/multiprocessing/api.py:547] Registered signal handler for SIGHUP",
    "ERROR: reporter.import_error(filename)",
    "step 3 error 802 error 999.5 maxid: 79, loss 3",
    "| epoch 001 | oom 0 | loss 3.1 | loss_scale 128",
    "WARNING: huggingface_hub: ReadTimeoutError('Read timed out.') thrown while requesting HEAD. Retrying in 1s [Retry 1/5].",
    "W0920 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 85005 closing signal SIGTERM",
    "'(ReadTimeoutError(\"HTTPSConnectionPool(host='cdn-lfs.huggingface.co')\"), '(Request ID: 1)')' thrown while requesting GET https://huggingface.co/x\nRetrying in 1s [Retry 1/5].",
    "ERROR:root:could not parse record 17: KeyError('label'); skipped",
    "n1:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
    "n1:1:1 [0] NCCL INFO NET/IB : No device found.",
    "A matching Triton is not available, some optimizations will not be enabled.\nModuleNotFoundError: No module named 'triton'",
]


def test_what_looks_fatal_and_is_not_gives_way_to_the_exception():
    last = "ZeroDivisionError: division by zero"
    found = {line: diagnose(f"{line}\n{TRACEBACK}{last}\n{line}\n").root_line for line in HARMLESS}
    assert found == dict.fromkeys(HARMLESS, last)


def test_what_stands_beside_a_failure_does_not_decide_its_kind():
    assert wrongly_diagnosed(table("beside")) == []


def test_what_a_file_of_another_rank_says_is_weighed_with_the_end_of_the_log():
    """A rank that a signal ended breaks the connections of the others, whatever these held."""
    broken = "ConnectionResetError: [Errno 104] Connection reset by peer"
    for said, kind in ((broken, "segfault"), ("EOFError: a short file", "user-exception")):
        file = RankFailure(rank=0, time_s=1.0, message=said, traceback=TRACEBACK + said)
        for steps in (0, 2, 700):
            log = output(steps) + SUMMARY.format(rank=2, code=-11)
            assert diagnose(log, failures=(file, RankFailure(rank=2))).kind == kind


def test_a_file_of_another_rank_does_not_show_that_the_job_outlived_an_exception():
    """Its own rank had still to write the steps of before when it was printed."""
    echo = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:45"
    file = RankFailure(rank=0, time_s=9.0, message=echo, traceback=TRACEBACK + echo)
    log = f"{TRACEBACK}KeyError: 'mask'\n{output(200)}" + SUMMARY.format(rank=2, code=1)
    assert diagnose(log, failures=(file,)).root_line == "KeyError: 'mask'"


def test_a_sentence_in_an_error_file_and_a_warning_are_no_exception():
    preempted = RankFailure(rank=1, time_s=1.0, message="worker was preempted")
    warning = "VersionMismatchWarning: Mismatched versions found\n"
    kind = diagnose(TIMEOUT).kind
    assert diagnose(TIMEOUT, failures=(preempted,)).kind == kind
    assert diagnose(warning + TIMEOUT).kind == kind
