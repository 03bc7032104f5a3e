"""Pure: one possible cause of an attempt's end, and its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.signatures import Sign

LOG = 0  # the log's `order` among the sources


@dataclass(frozen=True, slots=True)
class Source:
    """Where candidates come from: the log, a rank's error file, or an exit code."""

    name: str  # "log", "error file of rank 3", "exit status 137"
    order: int = LOG  # error files come before the log, earliest first; exit codes after it
    lines: Sequence[Line] = ()
    raised: Sequence[Raised] = ()  # the exceptions in the lines


@dataclass(frozen=True, slots=True)
class Candidate:
    """One explanation of a failure."""

    kind: str
    weight: float
    at: int  # index of its line in the source; -1 for an exit code, which has no line
    rank: int | None
    text: str  # the exception's message, or the line and the ones that follow it
    source: Source
    by: str = "sign"  # how it was recognised: "sign", "exception", "exit code"
    raised: Raised | None = None
    generic: bool = False  # only the exception itself is known
    explains: frozenset[str] = frozenset()  # kinds that are consequences of it
    usual: str = ""  # the kind without other knowledge; "" if it is the same
    why: tuple[str, ...] = ()  # reasons for a lower weight
    sign: Sign | None = None  # the sign that fits

    def as_kind(self, kind: str) -> Candidate:
        """Return the candidate with the kind that circumstances give it."""
        return self if kind == self.kind else replace(self, kind=kind, usual=self.kind)

    @property
    def in_log(self) -> bool:
        """Return whether it stands in a line of the log."""
        return self.at >= 0 and self.source.order == LOG

    @property
    def line(self) -> Line | None:
        """Return its line; None for an exit code."""
        return self.source.lines[self.at] if self.at >= 0 else None

    @property
    def number(self) -> int:
        """Return the number of its line in the log; 0 if it is not in the log."""
        return self.line.number if self.line is not None else 0

    @property
    def position(self) -> tuple[int, int]:
        """Return a sort key for its place among all candidates, the earliest first."""
        return self.source.order, self.at
