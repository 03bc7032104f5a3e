"""A log means the same however it comes: labelled, stamped, coloured, boxed in JSON."""

import pytest
from cases import check_cases, spread
from job_logs import diagnose, table
from transports import TRANSPORTS

# what the failed rank is cannot be told where each line names another one
ROWS = {
    row["name"]: (row["log"], row.get("exit_code"), row["kind"])
    for row in table("kinds") + table("reading")
    if row.get("reads") != "ranks"
}


def means_the_same(log: str, exit_code: int | None, kind: str, transport: str) -> None:
    carried = "\n".join(map(TRANSPORTS[transport], log.splitlines()))
    assert diagnose(carried, exit_code=exit_code).kind == kind


def test_each_log_means_the_same_through_one_transport():
    check_cases(spread(ROWS, list(TRANSPORTS)), means_the_same)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_log_means_the_same_through_each_transport(transport):
    check_cases(spread(ROWS, [transport]), means_the_same)
