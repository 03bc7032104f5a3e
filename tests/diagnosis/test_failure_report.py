"""The lines that people read between attempts and at the end: short, and with what to do."""

import pytest
from outcomes import outcome

from saferun.diagnosis.attempt_outcome import ASKED, AttemptOutcome, Decision
from saferun.diagnosis.deciding.retry_policy import AGAIN, STOP
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.explaining import failure_report
from saferun.diagnosis.process_end import launcher_end


def diagnosis(**facts) -> Diagnosis:
    usual = {
        "kind": "segfault",
        "group": "process",
        "verdict": "retry",
        "mitigations": (),
        "root_line": "Fatal Python error: Segmentation fault",
        "root_rank": 3,
        "explanation": "A crash in native code.",
        "advice": "Look at the trace.",
        "references": (),
    }
    return Diagnosis(**{**usual, **facts})


def attempt(number: int = 1, **facts) -> AttemptOutcome:
    return outcome(**{"number": number, "exit_code": 1, "lived_s": 7620.0, "ended_s": 1.0, **facts})


def test_between_attempts_one_line_says_what_failed_where_and_what_comes():
    failed = attempt(diagnosis=diagnosis())
    line = failure_report.between(failed, Decision(AGAIN, "it may be temporary", delay_s=1.0))
    assert line == (
        "attempt 1 failed after 2 h 7 min: segfault on rank 3 "
        "(Fatal Python error: Segmentation fault); it may be temporary: attempt 2 starts in 1 s"
    )
    change = "autotune-off (compile.autotune=off; cost: a few percent)"
    line = failure_report.between(failed, Decision(AGAIN, "x"), change)
    assert f"; with {change}: attempt 2 starts" in line
    line = failure_report.between(failed, Decision(AGAIN, "x"), begins=" at the beginning")
    assert line.endswith("; x: attempt 2 starts at the beginning")


def test_success_is_one_line_after_a_failure_and_none_at_once():
    after = [attempt(), attempt(2, exit_code=0)]
    mitigated = [attempt(), attempt(2, exit_code=0, mitigations=("a", "b"))]
    assert failure_report.success([attempt(exit_code=0)]) == []
    assert failure_report.success(after) == ["attempt 2 succeeded"]
    assert failure_report.success(mitigated) == ["attempt 2 succeeded, with a, b"]


def failure(history, **facts):
    decision = Decision(STOP, "the attempts are used up")
    return failure_report.failure(
        history, diagnosis(**facts), decision, host="node7", journal="/runs/x"
    )


def test_a_failed_run_says_what_where_what_was_tried_what_to_do_and_where_more_is():
    history = [attempt(kind="segfault"), attempt(2, kind="segfault", mitigations=("a",))]
    assert failure(history) == [
        "the run failed: A crash in native code (segfault on rank 3, host node7)",
        "  Fatal Python error: Segmentation fault",
        "It came twice. Run with `python -X faulthandler` to see where.",
        "tried: attempt 1: segfault after 2 h 7 min; attempt 2: segfault after 2 h 7 min, with a",
        "not tried again: the attempts are used up",
        "journal: /runs/x",
    ]


@pytest.mark.parametrize(
    ("line", "facts", "shown"),
    [
        ("failed (exitcode: -6) local_rank: 0 (pid: 25495) of binary: /usr/bin/python3", {},
         "rank 3 ended by SIGABRT (pid 25495) and printed no reason"),
        ("[rank0]:   exitcode  : -11 (pid: 7)", {"stack": ('File "t.py", line 3 in f',)},
         "rank 3 ended by SIGSEGV (pid 7)"),
        ("  exitcode  : -14", {"root_rank": None}, "a rank ended by SIGALRM and printed no reason"),
        ("  exitcode  : 3 (pid: 7)", {}, "exitcode  : 3 (pid: 7)"),
    ],
)  # fmt: skip
def test_the_end_of_a_rank_by_a_signal_is_told_in_words(line, facts, shown):
    assert failure([attempt(kind="abort-unknown")], root_line=line, **facts)[1] == f"  {shown}"


@pytest.mark.parametrize(
    ("number", "torchrun", "text"),
    [(9, True, "torchrun itself was killed (SIGKILL)"),
     (11, False, "the script's process ended by SIGSEGV")],
)  # fmt: skip
def test_the_launchers_own_end_is_told_and_no_line_of_the_job(number, torchrun, text):
    ended = attempt(
        diagnosis=diagnosis(),
        exit_code=128 + number,
        launcher_end=launcher_end(number, torchrun=torchrun),
    )
    assert failure([ended])[1] == f"  {text}"
    line = failure_report.between(ended, Decision(AGAIN, "it may be temporary"))
    assert f"segfault on rank 3 ({text}); it may be temporary" in line


def test_it_stays_short_and_cannot_move_the_terminal():
    lines = failure([attempt(n) for n in range(1, 11)], root_line="\x1b[2J" + "x" * 5000)
    assert len(lines) <= 15
    assert "tried: 6 earlier attempts; attempt 7: " in "\n".join(lines)
    assert max(map(len, lines)) < 400
    assert "\x1b" not in "\n".join(lines)


def test_a_run_that_was_asked_to_end_has_nothing_to_explain():
    assert failure([attempt(way=ASKED)]) == []


def test_the_stack_of_a_crash_stands_below_its_line():
    stack = ('File "train.py", line 7 in step', 'File "train.py", line 20 in main')
    lines = failure([attempt()], stack=stack)
    assert lines[1:4] == ["  Fatal Python error: Segmentation fault", *(f"    {s}" for s in stack)]
