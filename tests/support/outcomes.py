"""Attempts that have ended, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.diagnosis import Diagnosis


def outcome(*values: Any, **facts: Any) -> AttemptOutcome:
    """An attempt whose diagnosis has those facts that are fields of no outcome."""
    own = {name: facts.pop(name) for name in AttemptOutcome._fields if name in facts}
    diagnosis = Diagnosis(**{"kind": "no-failure", **facts})
    return AttemptOutcome(*values, **{"diagnosis": diagnosis, **own})
