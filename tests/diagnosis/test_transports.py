"""A log means the same however it comes: labelled, stamped, coloured, boxed in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from cases import check_cases
from job_logs import diagnose, table

TRANSPORTS: dict[str, Callable[[str], str]] = {
    "srun --label": lambda line: f"3: {line}",
    "torchrun --tee": lambda line: f"[train3]:{line}",
    "mpirun --tag-output": lambda line: f"[1,3]<stderr>:{line}",
    "docker logs --timestamps": lambda line: f"2025-05-01T10:00:00.123456789Z {line}",
    "kubectl logs --timestamps": lambda line: f"2025-05-01T10:00:00.123456789Z stderr F {line}",
    "docker compose": lambda line: f"trainer-1  | {line}",
    "journald": lambda line: f"May 01 10:00:00 node-7 train[812]: {line}",
    "ray": lambda line: f"\x1b[36m(main pid=812)\x1b[0m {line}",
    "a logger": lambda line: f"[2025-05-01 10:00:00,123][ERROR][launch.py:12] {line}",
    "a screen": lambda line: f"{line}\r",
    "docker's files": lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"}),
    "a JSON logger": lambda line: json.dumps({"ts": "10:00", "level": "error", "message": line}),
    "a collector": lambda line: json.dumps({"severity": "INFO", "textPayload": line, "ts": 1}),
    "a cluster's collector": lambda line: json.dumps(
        {"stream": "stderr", "log": line, "kubernetes": {"pod_name": "train-0"}}
    ),
}
# what the failed rank is cannot be told where each line names another one
ROWS = [row for row in table("kinds") + table("reading") if row.get("reads") != "ranks"]


def means_the_same(log: str, exit_code: int | None, transport: str) -> None:
    carried = "\n".join(map(TRANSPORTS[transport], log.splitlines()))
    alone = diagnose(log, exit_code=exit_code)
    assert diagnose(carried, exit_code=exit_code).kind == alone.kind


def cases(transports: list[str]) -> dict[str, tuple[str, int | None, str]]:
    return {
        f"{row['name']}, {transports[at % len(transports)]}": (
            *(row["log"], row.get("exit_code")),
            transports[at % len(transports)],
        )
        for at, row in enumerate(ROWS)
    }


def test_each_log_means_the_same_through_one_transport():
    check_cases(cases(list(TRANSPORTS)), means_the_same)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_log_means_the_same_through_each_transport(transport):
    check_cases(cases([transport]), means_the_same)
