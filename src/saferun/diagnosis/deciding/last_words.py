"""Pure: the last statement of a program, for failures that nothing else explains.

Programs report a mistake in their input in a few forms that are older than any log format: `name:
error: ...`, a shell's `file: line 3: ...`, `*** [target] Error 1`, a record of level ERROR, `Check
failed: ...`. Such a line at the end of a log is the program's own statement, unless it names
something that may pass. Its meaning is not known, so it weighs less than all else.
Go's `panic:` is none: other languages' exceptions are not read.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from saferun.diagnosis.deciding.matches import is_information
from saferun.diagnosis.reading import progress
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.tracebacks import GOES_ON

_LINES = 12  # number of last lines with text that are examined
_BRIEF_LINES = 3  # a log this short is an excerpt, chosen for the line that states the failure
_CHARS = 600  # characters of a line that are searched
_STATES = re.compile(
    r"(?:[\w./+-]{1,80}: )?(?:fatal |syntax |parse |internal )?(?:error|fatal)\b[:\s\]!-]"
    r"|\W{0,3}(?:ERROR|CRITICAL|FATAL|Error|Fatal)\b[:\s\]!-]"
    r"|(?!panic: )(?:\S{1,40} ){0,4}\W{0,2}(?:ERROR|CRITICAL|FATAL|error|fatal)\b[:\s\]-]"
    r"|g?make(?:\[\d{1,3}\])?: \*\*\* "
    r"|[\w./-]{1,80}: line \d{1,6}: "
    r"|F\d{4} \d\d:|F \S{1,200}:\d{1,6}\] "
    r"|.{0,200}?\b(?:Check failed|Assertion failed|assertion failed|ASSERT FAILED)\b"
)
_COMPLAINS = re.compile(
    r"\bexpected\b.{1,300}\b(?:but|got|found|received)\b|\bmust (?:be|have|match|contain)\b"
    r"|\b(?:invalid|unknown|unsupported|incompatible|mismatch\w{0,4}|missing|undefined)\b"
    r"|\bis not (?:a|an|in|defined|supported|implemented|valid|found|installed)\b|\bno such\b",
    re.I,
)
_EXPLAINS = re.compile(
    _COMPLAINS.pattern
    + r"|error|exception|fail|fatal|abort|denied|cannot|can't|could not|unable to"
    r"|\b(?:bad|illegal|wrong|refused|please|required?|requires|needs?|needed|not enough)\b"
    r"|\b(?:does not|doesn't)\b"
    r"|\bno (?:\w{1,30} ){1,4}(?:in|for|at|found|given|set)\b|\bnot (?:found|set|given|exist)"
    r"|\btoo (?:few|many|large|small)\b|\bexit(?:ing)?\b|\bgiving up\b",
    re.I,
)
# torchrun's own lines, and those with which it begins to report the end of a rank.
_LAUNCHER = re.compile(r"\b[EWI]\d{4} \d\d:\d\d:\S{1,20} \d{1,9} torch/|\*{20}")
_REPORTS = re.compile(r"failed \(exitcode: -?\d|Sending process \d{1,9} closing signal")
_REPORT_LINES = 400  # length of such a report of many ranks
_BAR = re.compile(r".{0,200}\d{1,3}%\|")
# What another attempt may not meet: other machines and processes, devices, time, space.
_LINK = re.compile(r"https?://\S{1,400}")  # mostly leads to the manual
_MAY_PASS = re.compile(
    r"time(?:d|s)?[ -]?out|deadline|connect|network|socket|refus|\breset\b|unreach|retr(?:y|ies)"
    r"|temporar|unavail|\bbusy\b|\block(?:ed)?\b|\blost\b|\bpeer|\bhosts?\b|\bports?\b|address"
    r"|resolve|rendezvous|collective|nccl|rccl|gloo|\bmpi|cuda|\bgpus?\b|device|driver|\bhip|\brocm"
    r"|\btpu|memory|alloc|space left|\bdisk|quota|signal|kill|terminat|abort|crash|preempt|evict"
    r"|cancel|\bnodes?\b|server|\b(?:429|5\d\d)\b|i/o|input/output|fault|core dumped|deadlock"
    r"|barrier|heartbeat|\bworkers?\b|\branks?\b|process|launch|slurm|srun|kubelet|container|pod\b"
    r"|exit (?:code|status)|download|upload|\bhub\b|http|fetch|stream|\bstall|interrupt",
    re.I,
)


def stated(lines: Sequence[Line]) -> int | None:
    """Return the index of the line in which a program states its failure; None if there is none.

    Args:
        lines: the lines of a log about which nothing else is known.
    """
    rows = [at for at, line in enumerate(lines) if any(map(str.isalnum, line.text))]
    brief = len(rows) <= _BRIEF_LINES
    for at in reversed(rows[-_LINES:]):
        text = lines[at].text[:_CHARS]
        if progress.step_in(text) is not None:
            return None  # the job continued
        states = _STATES.match(text) or _STATES.match(lines[at].raw[:_CHARS])
        if states is None and brief:
            states = _COMPLAINS.search(text)
        if states is None or is_information(lines[at]) or GOES_ON.search(text.lower()):
            continue
        if "warn" in text[:80].lower():
            continue
        return None if _MAY_PASS.search(_LINK.sub("", text)) else at
    return None


def of_rank(
    lines: Sequence[Line], rank: int | None, stderr_from: int | None, skip: Container[int] = ()
) -> int | None:
    """Return the index of the line with which a rank explained its exit; None if there is none.

    `sys.exit("text")`, and what is written before `os._exit(3)`, is the last of it before the
    launcher reports the rank's end.

    Args:
        lines: the lines of a log in which a rank ended with a status of its own.
        rank: that rank; None if unknown. What a prefix gives to another rank is that one's.
        stderr_from: number of the first line of stderr, on which a program explains itself; None
            where the log does not have it apart: only a line that complains counts then.
        skip: indices of the lines of exceptions, such as those that Python ignores at its exit.
    """
    reports = [at for at, line in enumerate(lines) if _REPORTS.search(line.raw)]
    if not reports and stderr_from is None:
        return None
    end = next((at for at in reports if at > reports[-1] - _REPORT_LINES), len(lines))
    rows = [
        at
        for at, line in enumerate(lines[:end])
        if at not in skip
        and (rank is None or line.rank in (None, rank))
        and line.number >= (stderr_from or 0)
        and any(map(str.isalnum, line.text))
        and not (_LAUNCHER.search(line.raw[:_CHARS]) or is_information(line))
    ]
    for at in reversed(rows[-_LINES:]):
        text = lines[at].text[:_CHARS]
        says = _STATES.match(text) or _EXPLAINS.search(text)
        silent = progress.step_in(text) is not None or _BAR.match(text) or "warn" in text.lower()
        if silent or text[0].isspace() or GOES_ON.search(text.lower()):
            continue
        if says or stderr_from is not None:
            return at
    return None
