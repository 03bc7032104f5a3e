"""Pure: the line of a log that states the root cause, to show to people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.base.phrases import says
from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.signatures import Knowledge

ROOT_CHARS = 600
_FAILURE_WORDS = (
    *("error", "exception", "fail", "fatal", "abort", "kill", "denied", "invalid", "cannot"),
)
_NEAR_ROWS = 100  # lines after a logger's record (Optuna) within which its traceback follows
# An exception's name with nothing, a number or a heading: the line below has the details.
_NAME_ALONE = re.compile(
    r"(?:^|[\s.])\w{1,80}(?:Error|Exception):(?: (?:Error )?Code:? ?\d{1,9}\.?| -{3,}.*-{3,})?$"
)


def root_line(best: Candidate, knowledge: Knowledge) -> str:
    """Return the deciding line as printed; what an exit status says of itself where it decides.

    Args:
        best: the root cause; for an exception, the line of its message that states it is returned.
        knowledge: the signs, which determine that line.
    """
    if best.line is None:
        return best.text
    raised, lines = best.raised, best.source.lines
    row = best.at if raised is None else _deciding_row(best, raised, lines, knowledge)
    if raised is not None and not raised.headed:
        row = _own_row(raised, lines, row)
    line = lines[row].raw.strip()
    if raised is not None and (_NAME_ALONE.search(line) or line.endswith((":", "…", "..."))):
        # A cause of its own, as of a compiler's back end, begins with its exception's name.
        below = [at for at in raised.rows if at > row] or range(row + 1, min(row + 3, len(lines)))
        rest = (lines[at].text.strip() for at in below)
        line = " ".join([line, *[text for text in rest if any(map(str.isalnum, text))][:1]])
    return line[:ROOT_CHARS]


def _own_row(raised: Raised, lines: Sequence[Line], row: int) -> int:
    """Return the line in which an exception that a record mentions is itself printed soon after."""
    record = lines[row].text
    for at in range(row + 1, min(row + _NEAR_ROWS, len(lines))):
        name, _, message = lines[at].text.partition(": ")
        if name == raised.type and message.strip() and message.strip() in record:
            return at
    return row


def _deciding_row(
    best: Candidate, raised: Raised, lines: Sequence[Line], knowledge: Knowledge
) -> int:
    """Return the line of an exception's message that contains a sign of the kind.

    The earlier sign in knowledge/failures.yaml counts, not the earlier line.
    """
    rows = [(row, lines[row].text.lower()) for row in raised.rows]
    for sign in knowledge.signs:
        if sign.kind == best.kind:
            for needle in sign.says:
                for row, text in rows:
                    if says(needle, text):
                        return row
    return best.at


def telling_line(lines: Sequence[Line]) -> str:
    """Return the line to show if nothing is recognised.

    It is the last line with a word of failure, else the last line that is not empty.
    """
    last = ""
    for line in reversed(lines):
        text = line.raw.strip()
        if text and is_of_failure(text.lower()):
            return text[:ROOT_CHARS]
        last = last or text
    return last[:ROOT_CHARS]


def is_of_failure(lower: str) -> bool:
    """Return whether a line (lower case) has a word of failure."""
    return any(word in lower for word in _FAILURE_WORDS)
