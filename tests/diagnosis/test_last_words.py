"""What a program states last of its own failure, where nothing else tells why it ended."""

from __future__ import annotations

import pytest
from job_logs import KNOWN, diagnose

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
