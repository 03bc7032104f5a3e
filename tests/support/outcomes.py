"""Attempts that have ended, for tests of what reads them."""

from typing import Any

from saferun.diagnosis.attempt_outcome import FAILED, SUCCEEDED, AttemptOutcome
from saferun.diagnosis.diagnosis import Diagnosis


def outcome(*values: Any, **facts: Any) -> AttemptOutcome:
    """An attempt whose diagnosis has those facts that are fields of no outcome."""
    own = {name: facts.pop(name) for name in AttemptOutcome._fields if name in facts}
    diagnosis = Diagnosis(**{"kind": "no-failure", **facts})
    ended = AttemptOutcome(*values, **{"diagnosis": diagnosis, **own})
    way = ended.way or (FAILED if ended.exit_code else SUCCEEDED)
    return ended._replace(way=way)
