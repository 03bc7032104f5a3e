"""Diagnoses of whole logs: those of failures provoked on purpose, and a corpus of real ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_logs import KNOWN, diagnose
from repo import RECORDS

from saferun.diagnosis.diagnosis import Diagnosis

# Two processes of torchrun and gloo (torch 2.x), each log as it was printed, paths renamed:
# kind, rank, and what the root line holds.
PROVOKED = {
    "abrt": ("abort-unknown", 1, "SIGABRT"),
    "agent-HUP": ("sighup-terminal-closed", None, "Received 1 death signal"),
    "agent-INT": ("interrupted", None, "Received 2 death signal"),
    "agent-TERM": ("sigterm-preempted", None, "Received 15 death signal"),
    "argparse": ("user-args-error", 0, "unrecognized arguments: --stepz 3"),
    "caught": ("user-exception", None, "IndexError: list index out of range"),
    "ckpt-cut": ("checkpoint-corrupt", 1, "failed finding central directory"),
    "disk-full": ("disk-full", 0, "No space left on device"),
    "empty": ("checkpoint-corrupt", None, "EOFError"),
    "exception": ("user-exception", 1, "KeyError: 'input_ids'"),
    "kill": ("host-oom-killed", 1, "exitcode: -9"),
    "mismatch": ("collective-mismatch", 1, "op.preamble.length"),
    "missing-node": ("rendezvous-connect-failed", None, "RendezvousTimeoutError"),
    "port-static": ("port-in-use", None, "failed to listen on any local network address"),
    "priv-port": ("port-privileged", None, "port: 97"),
    "term": ("sigterm-preempted", 1, "SIGTERM"),
    "thread": ("user-exception", 1, "TypeError: unsupported operand"),
    "timeout": ("nccl-timeout", 0, "Timed out"),
}


def test_every_failure_that_was_provoked_is_recognised():
    wrong = []
    for path in sorted((RECORDS / "logs").iterdir()):
        kind, rank, root = PROVOKED[path.stem]
        found = diagnose(path.read_bytes())
        if (found.kind, found.root_rank) != (kind, rank) or root not in found.root_line:
            wrong.append((path.stem, found.kind, found.root_rank, found.root_line))
    assert wrong == []
    assert {path.stem for path in (RECORDS / "logs").iterdir()} == set(PROVOKED)


@pytest.fixture(scope="module")
def real(corpus: Path) -> list[tuple[dict[str, Any], Diagnosis]]:
    path = corpus / "failure_logs.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name} in the corpus")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (r, diagnose(r["log"], exit_code=r["exit"] if r["exit_shown"] else None)) for r in records
    ]


def test_real_failures_get_the_right_verdict(real):
    wrong = [r["id"] for r, found in real if found.verdict != r["verdict"]]
    assert len(wrong) <= 0.05 * len(real), wrong


def test_real_failures_of_the_users_are_never_retried(real):
    retried = [
        r["id"] for r, found in real
        if r["verdict"] == "stop-user" and found.verdict in ("retry", "mitigate")
    ]  # fmt: skip
    # its log is that of any taken port; only the thread tells that the script ignores MASTER_PORT
    assert set(retried) <= {"mochi-22"}


def test_real_kinds_are_known_with_their_verdict_and_group(corpus):
    kinds = yaml.safe_load((corpus / "failure_kinds.yaml").read_text(encoding="utf-8"))["kinds"]
    ours = {name: (kind.verdict, kind.group) for name, kind in KNOWN.kinds.items()}
    assert {name: (k["verdict"], k["group"]) for name, k in kinds.items()}.items() <= ours.items()
