"""Pure: the diagnosis of a log that another program wrote, on any machine.

It extends the diagnosis of a live run's log (`classify`) by what only such logs contain: lines that
a terminal has broken.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.deciding import classify as core
from saferun.diagnosis.deciding.classify import Reading
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.foreign import broken_lines
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.signatures import Knowledge


def classify(evidence: Evidence, knowledge: Knowledge) -> Diagnosis:
    """Return what the evidence means.

    Args:
        evidence: a log, and other knowledge about the run.
        knowledge: the signs of failures (`signatures.load`).
    """
    return core.before_reading(evidence, knowledge) or read(evidence, knowledge).diagnosis


def read(evidence: Evidence, knowledge: Knowledge) -> Reading:
    """Read the log's last run, with the rest of the evidence; see `classify`."""
    return core.read(evidence, knowledge, _unclear)


def _unclear(found: Reading) -> Sequence[Line] | None:
    if found.is_known and not _is_broken_off(found):
        return None
    return broken_lines.whole(found.collected.log.lines)


def _is_broken_off(found: Reading) -> bool:
    """Return whether the cause is an unknown exception in a line that a terminal has broken."""
    best = found.steps[-1].taken if found.steps else None
    return (
        best is not None
        and best.generic
        and best.in_log
        and broken_lines.is_broken(best.source.lines, best.at)
    )
