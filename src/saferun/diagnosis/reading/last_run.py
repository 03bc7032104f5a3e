"""Pure: find the last run in a log that several runs were written to.

A requeued Slurm job, torchrun's restarts, a loop in a shell script and saferun itself append one
run to another. The last run is the one that failed; what ended an earlier run is over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.reading import progress
from saferun.diagnosis.reading.log_lines import Line

_HEAD_LINES = 6  # number of first lines that show the start of another run if they come again
_HEAD_WORD = re.compile(r"[^\W\d_]{4}")  # a line without a word does not count
_OF_TRACEBACK = (" ", "Traceback", 'File "')  # the last one where a collector removes blanks
_STEPS = 3  # after the end of a run, so many show that another one is under way
# The line names the run that starts, so the next line is that run's first.
_HANDED_OVER = re.compile(
    r"saferun: attempt \d{1,4} failed .{0,2000}attempt \d{1,4} starts|will restart worker group"
)
_ENDED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S{1,40} ON \S{1,200} CANCELLED AT |oom[_-]kill event"
    r"|Root Cause \(first observed failure\)|^saferun: attempt \d{1,4} failed "
    r"|^(?:\S{1,80}: line \d{1,6}: )?\s{0,4}\d{0,9}\s{0,4}"
    r"(?:Killed|Terminated|Aborted|Segmentation fault|Bus error|Illegal instruction"
    r"|Floating point exception|Trace/breakpoint trap)"  # bash puts no blank after 24 letters
    r"|\(core dumped\)|DUE TO (?:PREEMPTION|JOB REQUEUE|NODE FAILURE)"
    r"|\brequeu(?:ing|ed)\b.{0,40}\bjob\b"
    r"|\b[Jj]ob\b.{0,40}\b(?:requeu(?:ing|ed)|preempted)\b|Received \S{0,20}SIGTERM death signal"
)
_COMMAND = (  # as `set -x` prints it
    r"^\+{1,3} (?:\S{0,80}/)?(?:srun|torchrun|python3?|accelerate|deepspeed|saferun|mpirun|exec) "
)
_SHOWN = re.compile(_COMMAND)
_STARTED = re.compile(rf"Setting OMP_NUM_THREADS environment variable for each process|{_COMMAND}")
# Each line that _HANDED_OVER or _ENDED fits has one of these: a cheap test for every line.
_WORDS = (
    *("saferun: attempt ", "will restart worker group", "CANCELLED AT ", "oom_kill event"),
    *("oom-kill event", "Root Cause (first", "Killed", "Terminated", "Aborted", "(core dumped)"),
    *("Segmentation fault", "Bus error", "Illegal inst", "Floating point", "breakpoint trap"),
    *("DUE TO ", "equeu", "preempted", "SIGTERM death signal"),
)
_RAISED = "Traceback (most recent call last)"  # may be the end of a run if another one begins
_DIGITS = re.compile(r"\d{1,20}")


def last_start(lines: Sequence[Line]) -> int:
    """Return the index of the first line of the last run; 0 if the log has only one run."""
    whole = "\n".join([line.text for line in lines])
    words = [word for word in _WORDS if word in whole]
    if not words and _RAISED not in whole:
        return 0
    head: frozenset[str] = frozenset()  # forms of the first run's first lines
    steps: list[int] = []  # indices of lines
    start, ended, reached = 0, False, -1
    raised = _EndedByException(lines)
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
        elif not ended and (found := raised.start(at, text)) is not None:
            start = found
    return start if start < len(lines) else 0


class _EndedByException:
    """A run that an exception has ended before another one begins; weaker than an explicit end.

    A rank may continue after another rank's exception or after one that it caught; another node may
    start late, or the script may run another program. So the same command must appear again, or the
    log's first lines must come again from the same rank, with lower steps.

    Args:
        lines: the log's lines.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines, self._head = lines, _head(lines[:_HEAD_LINES])
        self._raised: int | None = None  # line of the last exception
        self._again: int | None = None  # a later line that equals one of the first lines
        self._step = 0  # last step before the exception
        self._read = 0  # number of lines that _last_step and _commands cover
        self._last_step = 0
        self._commands: set[str] = set()  # commands that the shell has printed

    def start(self, at: int, text: str) -> int | None:
        """Read the next line; return where a run that it reveals begins; None for none.

        Args:
            at: the line's index.
            text: the line.
        """
        if _RAISED in text:
            self._raised, self._again = at, None
        elif self._raised is None:
            return None
        elif _SHOWN.search(text):
            self._read_up_to(self._raised)
            if text in self._commands:
                return self._begin(at)
        elif self._lines[at].rank != self._lines[self._raised].rank:
            return None
        elif self._again is None:
            if _shape(text) in self._head:
                self._read_up_to(self._raised)
                self._again, self._step = at, self._last_step
        elif (step := progress.step_in(text)) is not None and step < self._step:
            return self._begin(self._again)
        return None

    def _read_up_to(self, end: int) -> None:
        """Store the last step and the commands before a line; each line is read once."""
        for line in self._lines[self._read : end]:
            step = progress.step_in(line.text)
            self._last_step = self._last_step if step is None else step
            if _SHOWN.search(line.text):
                self._commands.add(line.text)
        self._read = end

    def _begin(self, at: int) -> int:
        self._raised = self._again = None
        return at


def _head(lines: Sequence[Line]) -> frozenset[str]:
    """Return the forms of a log's first lines, without those that repeat within any run.

    Steps, warnings, and tracebacks with their exceptions repeat in such a way.
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
