"""What is read in a log: records, numbers, progress, other languages' exceptions, runs, ranks."""

from typing import Any

import pytest
from cases import check_cases
from job_logs import TRACEBACK, diagnose, table

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


REFUSED = "RuntimeError: File /ckpt/run7/step_500.pt cannot be opened.\n"
PARTLY = "OSError: 268435456 requested and 91226112 written\n"
WRITERS = {
    "nothing is known of the disk": (REFUSED, None, "disk-full"),
    "the disk is full": (REFUSED, False, "disk-full"),
    "there is room": (REFUSED, True, "permission-denied"),
    "there is room, and a part was written": (PARTLY, True, "disk-full"),
}


def a_writer_fails(log: str, disk_ample: bool | None, kind: str) -> None:
    assert diagnose(TRACEBACK + log, disk_ample=disk_ample).kind == kind


def test_a_writer_without_an_error_number_is_judged_by_the_disk():
    check_cases(WRITERS, a_writer_fails)


def test_without_an_error_number_a_full_disk_is_called_likely():
    assert "likely cause" in diagnose(TRACEBACK + REFUSED).explanation
    numbered = TRACEBACK + "OSError: [Errno 28] No space left on device: 'a.pt'\n"
    assert "likely cause" not in diagnose(numbered).explanation
