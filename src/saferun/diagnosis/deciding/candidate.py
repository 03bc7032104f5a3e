"""Pure: one thing that may have ended an attempt, and where it is known from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.signatures import Sign

LOG = 0  # the `order` of the log among the sources


@dataclass(frozen=True, slots=True)
class Source:
    """Where candidates come from: the log, a rank's error file, or an exit code."""

    name: str  # "log", "error file of rank 3", "exit status 137"
    order: int = LOG  # error files come before the log, the earliest first; exit codes after it
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
    by: str = "sign"  # what recognised it: "sign", "exception", "exit code"
    raised: Raised | None = None
    generic: bool = False  # nothing is known but the exception
    explains: frozenset[str] = frozenset()  # kinds that are its consequence
    usual: str = ""  # the kind that it has where nothing else is known; "" where it is the same
    why: tuple[str, ...] = ()  # what took weight from it
    sign: Sign | None = None  # the one that fits the place

    def as_kind(self, kind: str) -> Candidate:
        """Return it under the kind that circumstances give it."""
        return self if kind == self.kind else replace(self, kind=kind, usual=self.kind)

    @property
    def in_log(self) -> bool:
        """Whether a line of the log says it."""
        return self.at >= 0 and self.source.order == LOG

    @property
    def line(self) -> Line | None:
        """The line that says it; None for an exit code."""
        return self.source.lines[self.at] if self.at >= 0 else None

    @property
    def number(self) -> int:
        """The number of its line in the log; 0 for what stands beside the log."""
        return self.line.number if self.line is not None else 0

    @property
    def position(self) -> tuple[int, int]:
        """Where it stands among all candidates, the earliest first."""
        return self.source.order, self.at
