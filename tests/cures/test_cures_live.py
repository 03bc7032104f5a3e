"""A failure that a launcher can cure is cured, and its one setting only: real failures, whole runs.

The rows are in table.py; they run with `-m slow`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from table import CASES, NOT_HERE, Case
from ways import go

from saferun import knowledge

SUPERVISED, PLAIN = "saferun", "torchrun"
REPEATED = ("retry", "mitigate")


def rows():
    return [pytest.param(case, id=case.kind, marks=pytest.mark.slow) for case in CASES]


def run(case: Case, way: str, folder: Path):
    if case.needs and not case.needs():
        pytest.skip(f"{case.kind}: {case.needs.__doc__}")
    return go(case, way, folder)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", rows())
def test_saferun_finishes_with_the_cure_of_the_kind_and_no_other(case, tmp_path):
    outcome = run(case, SUPERVISED, tmp_path)
    assert outcome.finished, outcome.err
    assert set(outcome.kinds) == {case.kind}
    assert outcome.cures == case.cures


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", rows())
def test_torchrun_alone_does_not_finish(case, tmp_path):
    outcome = run(case, PLAIN, tmp_path)
    assert not outcome.finished
    assert outcome.status not in (0, None), "it neither finished nor failed"


def test_every_kind_that_is_tried_again_has_a_row_or_a_reason_why_not():
    kinds = knowledge.load_failures({}).kinds
    repeated = {name for name, kind in kinds.items() if kind.verdict in REPEATED}
    shown = {case.kind for case in CASES}
    assert shown | set(NOT_HERE) == repeated
    assert not shown & set(NOT_HERE)


def test_every_row_expects_cures_that_its_kind_has():
    kinds = knowledge.load_failures({}).kinds
    wrong = [c.kind for c in CASES if not set(c.cures) <= set(kinds[c.kind].mitigations)]
    assert not wrong
