"""A failure that a launcher can mitigate is, by its one setting only: real failures, whole runs.

The rows are in table.py and gpu_table.py; they run with `-m slow`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gpu_table
import pytest
from table import CASES, NOT_HERE, Case
from ways import HEALTHY, SUPERVISED, Outcome, go, missing

from saferun.diagnosis import signatures

PLAIN = "torchrun"
LIMIT_S = 900.0  # of a run; none hangs, and a loaded machine is no failure
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
REPEATED = ("retry", "mitigate")
ALL = CASES + gpu_table.CASES


def rows(*, stops: bool | None = None):
    chosen = [case for case in ALL if stops in (None, case.stops)]
    titles = [f"{case.kind}{'-gpu' * bool(case.gpus)}" for case in chosen]
    marks = pytest.mark.slow
    return [pytest.param(case, id=t, marks=marks) for case, t in zip(chosen, titles, strict=True)]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Case, str], Outcome]:
    """Run a row in a way, where the machine has what it needs."""

    def run(case: Case, way: str) -> Outcome:
        if why := missing(case):
            pytest.skip(f"{case.kind}: {why}")
        return go(case, way, tmp_path, LIMIT_S)

    return run


@pytest.mark.parametrize("case", rows(stops=False))
def test_saferun_finishes_with_the_mitigation_of_the_kind_and_no_other(case, run):
    outcome = run(case, SUPERVISED)
    assert outcome.finished, outcome.err
    assert set(outcome.kinds) == {case.kind}
    assert outcome.mitigations == case.mitigations


@pytest.mark.parametrize("case", rows(stops=True))
def test_what_no_mitigation_helps_is_named_and_not_tried_again(case, run):
    outcome = run(case, SUPERVISED)
    assert not outcome.finished
    assert outcome.kinds == (case.kind,)
    assert outcome.attempts == 1


@pytest.mark.parametrize("case", rows())
def test_torchrun_alone_does_not_finish(case, run):
    outcome = run(case, PLAIN)
    assert not outcome.finished
    assert outcome.status not in (0, None), "it neither finished nor failed"


@pytest.mark.parametrize("case", rows(stops=False))
def test_without_its_fault_the_program_does_its_work(case, run):
    outcome = run(case, HEALTHY)
    assert outcome.finished, outcome.err


def test_every_kind_that_is_tried_again_has_a_row_or_a_reason_why_not():
    kinds = signatures.load().kinds
    repeated = {name for name, kind in kinds.items() if kind.verdict in REPEATED}
    shown = {case.kind for case in ALL if not case.stops}
    assert shown | set(NOT_HERE) == repeated
    assert not shown & set(NOT_HERE)
