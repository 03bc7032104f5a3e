"""The evidence that decided is named: the source of the root cause, and what was measured."""

import pytest
from job_logs import TIMEOUT, TRACEBACK, diagnose

from saferun.diagnosis.deciding.known_from import known_from
from saferun.diagnosis.evidence import Hang, RankFailure

ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
CODES = "Traceback (most recent call last):\n  File 't.py', line 1, in <module>\nKeyError: 'x'"


@pytest.mark.parametrize(
    ("log", "facts", "named"),
    [
        (f"{TRACEBACK}KeyError: 'x'\n", {}, ("log",)),
        ("", {"failures": (RankFailure(rank=2, traceback=CODES),)}, ("error file of rank 2",)),
        ("", {"exit_code": 137}, ("exit status 137",)),
        (
            "",
            {"exit_code": 137, "oom_kills": 2},
            ("exit status 137", "kernel: 2 killed for lack of memory while it ran"),
        ),
        (
            "",
            {"exit_code": -9, "oom_kills": 0},
            ("exit status -9", "kernel: no process was killed for lack of memory"),
        ),
        (
            "",
            {"exit_code": -7, "shm_ample": True},
            ("exit status -7", "shared memory: large and mostly free"),
        ),
        (
            "",
            {"exit_code": -11, "finished": True},
            ("exit status -11", "receipts: the scripts of all ranks had reached their end"),
        ),
        (  # the log's own statement: no receipts were read
            f"Training finished.\n{TIMEOUT}\n",
            {},
            ("log", "numbers and lines beside the message, which is that of nccl-timeout"),
        ),
        (
            f"{TRACEBACK}{ILLEGAL}\n",
            {"age_s": 7200.0, "step": 900},
            ("log", "progress up to step 900 in 2 h"),
        ),
        (f"{ILLEGAL}\n", {"age_s": 7200.0}, ("log", "progress in 2 h")),
        (f"{ILLEGAL}\n", {"step": 9000}, ("log", "progress up to step 9000")),
        (f"Epoch: [19][300/7922]\n{ILLEGAL}\n", {}, ("log", "progress, as the log shows it")),
        ("", {"failures": (RankFailure(traceback=CODES),)}, ("error file",)),
        (
            f"{TRACEBACK}RuntimeError: File /d/a.pt cannot be opened.\n",
            {"disk_ample": True},
            ("log", "disk: there is room where the file could not be opened"),
        ),
        ("", {"exit_code": 1, "hang": Hang("hang", 1, "x")}, ("the watch for silence",)),
        ("", {"exit_code": 1, "unkillable": 2}, ("processes: 2 could not be ended",)),
        ("", {"exit_code": 0}, ("exit status 0",)),
        ("", {"exit_code": 137, "keeper": "it was killed"}, ("the keeper's end",)),
        (
            "BrokenPipeError: [Errno 32] Broken pipe\n",
            {"exit_code": 1, "reader_gone": True},
            ("log", "the output's reader: gone"),
        ),
        ("bye\n", {}, ()),
    ],
)
def test_what_decided_is_named(log, facts, named):
    assert diagnose(log, **facts).decided_by == named


def test_people_are_told_of_what_the_jobs_own_words_do_not_show():
    assert known_from(("log",)) == known_from(("error file of rank 1",)) == known_from(()) == []
    assert known_from(("log", "disk: full")) == ["known from: log; disk: full"]
