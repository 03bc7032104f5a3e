"""Pure: the last run of a log to which several were written.

A requeued Slurm job, torchrun's restarts, a loop in a shell script and saferun itself append one
run to the other. The last one is the one that failed: what ended an earlier one is over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.reading import progress
from saferun.diagnosis.reading.log_lines import Line

_HEAD_LINES = 6  # a log's first ones: they show the start of another run
_HEAD_WORD = re.compile(r"[^\W\d_]{4}")  # a line without a word does not count
_OF_TRACEBACK = (" ", "Traceback", 'File "')  # the last where a collector takes blanks away
_STEPS = 3  # after the end of a run: another one is under way
# The one that starts is named, so the next line is its first.
_HANDED_OVER = re.compile(
    r"saferun: attempt \d{1,4} failed .{0,2000}attempt \d{1,4} starts|will restart worker group"
)
_ENDED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S{1,40} ON \S{1,200} CANCELLED AT |oom[_-]kill event"
    r"|Root Cause \(first observed failure\)|^saferun: attempt \d{1,4} failed "
    r"|^(?:\S{1,80}: line \d{1,6}: )?\s{0,4}\d{0,9}\s{0,4}"
    r"(?:Killed|Terminated|Aborted|Segmentation fault|Bus error|Illegal instruction"
    r"|Floating point exception|Trace/breakpoint trap)"  # bash puts no blank behind 24 letters
    r"|\(core dumped\)|DUE TO (?:PREEMPTION|JOB REQUEUE|NODE FAILURE)"
    r"|\brequeu(?:ing|ed)\b.{0,40}\bjob\b"
    r"|\b[Jj]ob\b.{0,40}\b(?:requeu(?:ing|ed)|preempted)\b|Received \S{0,20}SIGTERM death signal"
)
_COMMAND = (  # `set -x` shows it so
    r"^\+{1,3} (?:\S{0,80}/)?(?:srun|torchrun|python3?|accelerate|deepspeed|saferun|mpirun|exec) "
)
_SHOWN = re.compile(_COMMAND)
_STARTED = re.compile(rf"Setting OMP_NUM_THREADS environment variable for each process|{_COMMAND}")
# Each of these is in a line that _HANDED_OVER or _ENDED fits: a cheap test, for every line.
_WORDS = (
    *("saferun: attempt ", "will restart worker group", "CANCELLED AT ", "oom_kill event"),
    *("oom-kill event", "Root Cause (first", "Killed", "Terminated", "Aborted", "(core dumped)"),
    *("Segmentation fault", "Bus error", "Illegal inst", "Floating point", "breakpoint trap"),
    *("DUE TO ", "equeu", "preempted", "SIGTERM death signal"),
)
# May be the end of a run, where the shell shows the same command again.
_RAISED = "Traceback (most recent call last)"
_DIGITS = re.compile(r"\d{1,20}")


def last_start(lines: Sequence[Line]) -> int:
    """Return the index of the line with which the last run begins; 0 where the log has one."""
    whole = "\n".join([line.text for line in lines])
    words = [word for word in _WORDS if word in whole]
    if not words and _RAISED not in whole:
        return 0
    head: frozenset[str] = frozenset()  # forms of the first run's first lines
    steps: list[int] = []  # lines
    start, ended, reached = 0, False, -1
    raised, shown = False, set[str]()  # whether an exception stands before, the shell's commands
    for at, line in enumerate(lines):
        text = line.text
        telling = any(word in text for word in words)
        if telling and _HANDED_OVER.search(text):
            start, ended = at + 1, False
        elif telling and _ENDED.search(text):
            ended, reached, steps = True, -1, []
            head = head or _head(lines[: min(at, _HEAD_LINES)])
        elif ended and (_STARTED.search(text) or _shape(text) in head):
            start, ended = at, False
        elif ended and (step := progress.step_in(text)) is not None and step > reached:
            reached = step
            steps.append(at)
            if len(steps) == _STEPS:
                start, ended = steps[0], False
        elif raised and text in shown:
            start, raised = at, False
        raised = raised or _RAISED in text
        if text.startswith("+") and _SHOWN.search(text):
            shown.add(text)
    return start if start < len(lines) else 0


def _head(lines: Sequence[Line]) -> frozenset[str]:
    """Return the forms of a log's first lines, without those that any run repeats.

    Such are steps, warnings, and tracebacks with the exception that ends them.
    """
    texts = [line.text for line in lines]
    return frozenset(
        _shape(text)
        for before, text in zip(["", *texts], texts, strict=False)
        if _HEAD_WORD.search(text)
        and "arning" not in text
        and progress.step_in(text) is None
        and not text.startswith(_OF_TRACEBACK)
        and not before.startswith(_OF_TRACEBACK)
    )


def _shape(text: str) -> str:
    return _DIGITS.sub("0", text)
