"""What is read in a log: records, numbers, progress, other languages' exceptions, runs, ranks."""

from __future__ import annotations

from typing import Any

import pytest
from cases import check_cases
from job_logs import diagnose, table

ROWS = table("reading")


def reads_as_it_should(row: dict[str, Any]) -> None:
    found = diagnose(row["log"], exit_code=row.get("exit_code"))
    assert found.kind == row["kind"], found.root_line
    assert row.get("line", "") in found.root_line
    assert row.get("rank", found.root_rank) == found.root_rank


@pytest.mark.parametrize("what", sorted({row["reads"] for row in ROWS}))
def test_a_log_is_read_by_its_content_not_by_its_words(what):
    rows = {row["name"]: (row,) for row in ROWS if row["reads"] == what}
    check_cases(rows, reads_as_it_should)
