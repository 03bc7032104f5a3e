"""What a program states last of its own failure, where nothing else tells why it ended."""

import pytest
from job_logs import KNOWN, SUMMARY, TRACEBACK, diagnose

from saferun.diagnosis.deciding import classify
from saferun.diagnosis.evidence import Observation

STATED = [
    "make: *** [Makefile:12: train] Error 1",
    "train.sh: line 8: syntax error near unexpected token `('",
    "train.sh: line 12: SEED: unbound variable",
    "[2024-01-01 10:00:00,000] [ERROR] [data.py:20:read] The vocabulary is not formatted",
    "F0412 11:12:08.555555 12345 transformer.cpp:63] the corpus has 1 of 3 channels",
    "config: fatal error: the schedule has no steps",
    "Wanted shape (4, 86), must match the (16, 86) of the parameter",
    "2024-01-01 10:00:00 trainer CRITICAL the corpus has no sentences",
    "ERROR: there is no schedule in the settings of the training, which no option warns of",
]


@pytest.mark.parametrize("line", STATED)
def test_the_statement_is_the_programs_own_failure_and_the_half_answer_stays(line):
    below = "ERROR: UserWarning: the cache is cold\n"  # states no failure
    found = diagnose(f"loading\n{line}\n{below}" if line != STATED[6] else line)
    assert (found.kind, found.root_line) == ("user-exception", line)
    assert found.decided_by == ("the log's last statement",)


@pytest.mark.parametrize(
    "log",
    [
        "ERROR: connection to the master failed",
        "[ERROR] timed out in step 9",
        "ERROR: one batch was dropped\nstep 7 loss 0.3\n",  # the job went on
        "ERROR: no cache, ignoring it",
        "INFO | 0 errors: must be fine",
        "the loss is 0.3",
    ],
)
def test_what_may_pass_or_was_survived_is_no_such_statement(log):
    assert diagnose(log).kind == "unknown"


def test_what_the_machine_shows_comes_before_it():
    found = diagnose("ERROR: the corpus has no sentences")
    full = Observation("disk", "/ckpt is full", "disk-full")
    assert classify.by_machine(found, [full], KNOWN).kind == "disk-full"


def test_what_a_rank_said_before_its_status_is_not_what_its_peers_saw_of_it():
    said = "the corpus has 3 shards, and 8 ranks want one each"
    seen = f"{TRACEBACK}RuntimeError: [gloo/pair.cc:534] Connection closed by peer [::1]:2"
    peer = "".join(f"[rank0]: {row}\n" for row in ("one record was lost", *seen.split("\n")))
    report = "E0101 10:00:00.1 7 torch/x.py:8] failed (exitcode: 1) local_rank: 1 (pid: 11) of x\n"
    end = f"{report}{SUMMARY.format(rank=1, code=1)}"
    found = diagnose(f"{said}\n{peer}{end}", stderr_from=1)
    assert (found.kind, found.root_line, found.root_rank) == ("user-exception", said, 1)
    assert diagnose(f"{peer}{end}", stderr_from=1).kind != "user-exception"
    late = f"Exception ignored in: <function f at 0x1>\n{TRACEBACK}KeyError: 'a'\n"
    own = diagnose(f"{said}\n{late}{end}", stderr_from=1)
    assert (own.kind, own.root_line, own.root_rank) == ("user-exception", said, 1)


BESIDE_ROOT = """Failures:
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : {beside} (pid: 12)
Root Cause (first observed failure):
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {root} (pid: 11)
"""


@pytest.mark.parametrize(
    ("beside", "root", "kind", "rank"),
    [
        (1, -15, "user-exception", 2),  # torchrun ended rank 1, since another one had failed
        (-15, 1, "peer-lost", 1),
        (1, 1, "peer-lost", 1),
        (-15, -15, "peer-lost", 1),
    ],
)
def test_the_rank_that_torchrun_itself_ended_was_not_the_first(beside, root, kind, rank):
    """It names the earliest error file, and a rank that exits with a text writes none."""
    seen = f"{TRACEBACK}RuntimeError: [gloo/pair.cc:534] Connection closed by peer [::1]:2"
    peer = "".join(f"[rank1]: {row}\n" for row in seen.split("\n"))
    end = "Sending process 11 closing signal SIGTERM\n" + BESIDE_ROOT
    log = f"three shards, and 4 ranks want one each\n{peer}{end.format(beside=beside, root=root)}"
    found = diagnose(log, stderr_from=1)
    assert (found.kind, found.root_rank) == (kind, rank)


FILES = """Failures:
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 12)
  error_file: {file}
Root Cause (first observed failure):
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 11)
  error_file: /tmp/1/error.json
"""


@pytest.mark.parametrize(
    ("code", "file", "prefix", "kind", "rank"),
    [
        (3, "<N/A>", "[rank1]: ", "user-exception", 2),
        (3, "<N/A>", "", "peer-lost", 1),  # it may be rank 2 that printed it
        (3, "/tmp/2/error.json", "[rank1]: ", "peer-lost", 1),
        (-15, "<N/A>", "[rank1]: ", "peer-lost", 1),
        (-9, "<N/A>", "[rank1]: ", "peer-lost", 1),  # torchrun's own SIGKILL
    ],
)
def test_a_rank_that_chose_to_end_comes_before_the_exception_of_a_peer_that_saw_it_go(
    code, file, prefix, kind, rank
):
    seen = f"{TRACEBACK}RuntimeError: [gloo/pair.cc:534] Connection closed by peer [::1]:2"
    peer = "".join(f"{prefix}{row}\n" for row in seen.split("\n"))
    report = "E0101 10:00:00.1 7 torch/x.py:8] failed (exitcode: 1) local_rank: 1 (pid: 11) of x\n"
    log = f"three shards, and 4 ranks want one each\n{peer}{report}"
    found = diagnose(log + FILES.format(code=code, file=file), stderr_from=1)
    assert (found.kind, found.root_rank) == (kind, rank)
