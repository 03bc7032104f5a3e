"""Failures that were provoked: their whole logs are read right, and however they travel.

tools/record_logs.py has recorded them; another torch may print them in other words.
"""

from typing import Any

import pytest
from cases import check_cases, spread
from job_logs import diagnose
from provoked import FAILURES, LOGS, TABLE, ProvokedFailure, lines
from transports import LOGS as WAYS

RECORDED = {path.stem for path in LOGS.iterdir()}
ROWS = {  # of the mitigation table
    name: ProvokedFailure(name, name.removeprefix(f"{TABLE}-"), "", None, "", ())
    for name in sorted(RECORDED)
    if name.startswith(TABLE)
}
PROVOKED = {one.name: one for one in FAILURES} | ROWS
# What a live run knows beside its output, where the output alone means something else.
BESIDE: dict[str, dict[str, Any]] = {
    "bus-error": {"shm_ample": True},
    "killed-from-outside": {"oom_kills": 0},
}


def is_known(one: ProvokedFailure, way: str) -> None:
    log = "\n".join(WAYS[way](lines(LOGS / f"{one.name}.log")))
    found = diagnose(log, **BESIDE.get(one.kind, {}))
    assert found.kind == one.kind, found.root_line
    if way == "as it was printed":
        assert one.root in found.root_line
        assert one.rank in (None, found.root_rank)


def test_every_failure_of_the_table_is_recorded():
    assert set(PROVOKED) == RECORDED


CASES = {name: (one,) for name, one in PROVOKED.items()}


def test_every_provoked_failure_is_recognised_from_its_whole_log():
    check_cases(spread(CASES, ["as it was printed"]), is_known)


def test_every_provoked_failure_is_recognised_through_one_more_transport():
    check_cases(spread(CASES, list(WAYS)[1:]), is_known)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_provoked_failure_is_recognised_through_each_transport(way):
    check_cases(spread(CASES, [way]), is_known)
