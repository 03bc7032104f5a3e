"""Pure: the diagnosis of a log that another program wrote, on any machine.

It is the diagnosis of a live run's log (`classify`) with what only such logs hold: statuses of
Windows, exceptions of other languages, and lines that a terminal has broken.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.deciding import classify as core
from saferun.diagnosis.deciding import second_reading
from saferun.diagnosis.deciding.classify import Reading
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.foreign import broken_lines, panics, windows_status
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.signatures import Knowledge


def classify(evidence: Evidence, knowledge: Knowledge) -> Diagnosis:
    """Return what the evidence means.

    Args:
        evidence: a log, and what is known beside it.
        knowledge: how failures look (`signatures.load`).
    """
    return core.before_reading(evidence, knowledge) or read(evidence, knowledge).diagnosis


def read(evidence: Evidence, knowledge: Knowledge) -> Reading:
    """Read the log's last run, with the rest of the evidence; see `classify`."""

    def of_run(log: Sequence[Line]) -> Reading:
        lines = windows_status.named(log)
        return core.of_run(evidence, lines, knowledge, panics.find, _read_again, _is_read)

    return core.of_last_run(evidence.log.lines, of_run)


def _read_again(lines: Sequence[Line]) -> list[Line]:
    return second_reading.lines(broken_lines.whole(lines))


def _is_read(found: Reading) -> bool:
    """Return whether it is known, and no exception in a line that a terminal has broken."""
    best = found.steps[-1].taken if found.steps else None
    if best is None or not (best.generic and best.in_log):
        return found.is_known
    return found.is_known and not broken_lines.is_broken(best.source.lines, best.at)
