"""After a failure of NCCL's the next attempt has NCCL test its paths; the answer is evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import program, run

KEEP = ["--profile=cpu", "--set=retry.backoff_s=[0, 0]", "--nproc-per-node=2"]


def job(finding: str, *failures: str, version: str = "2.32.3") -> list[str]:
    """Return the arguments of a job that fails so in its attempts."""
    return [*KEEP, program("nccl_fails"), finding, version, *failures]


def asked(out: str) -> list[str]:
    """Return what each attempt of a run had in the variable."""
    return sorted({line for line in out.splitlines() if ": asked " in line})


def test_data_that_arrives_wrong_is_the_machines_fault(tmp_path: Path):
    with run(tmp_path, *job("wrong", "system", "internal")) as made:
        assert made.end() != 0
        first, last = made.events("ended")
    assert asked(made.out) == ["attempt 1: asked None", "attempt 2: asked 1"], made.err
    assert (first["kind"], first["action"]) == ("nccl-system-error", "again")
    assert "with nccl-diagnostics (NCCL_RUN_DIAGNOSTICS=1" in made.err
    assert (last["kind"], last["action"], last["root_rank"]) == ("gpu-p2p-corrupt", "stop", None)
    finding = "NCCL's own test: write mismatch from GPU 0 (rank 0) to GPU 1 (rank 1) (NVL)"
    assert finding in last["decided_by"][-1]
    assert finding in made.err
    assert "p2p: write mismatch srcRank=0" in last["root_line"]


def test_an_answer_is_kept_where_the_rank_aborts_and_is_not_asked_for_again(tmp_path: Path):
    with run(tmp_path, *job("well", "system", "aborts", "well")) as made:
        assert made.end() == 0, made.err
        ended = made.events("ended")
    shown = ["attempt 1: asked None", "attempt 2: asked 1", "attempt 3: asked None"]
    assert asked(made.out) == shown, made.err
    assert [one["kind"] for one in ended][:2] == ["nccl-system-error", "nccl-internal-error"]
    assert ended[1]["decided_by"][-1] == ("NCCL's own test: the paths between GPUs work (2 of 2)")


def test_paths_that_fail_are_told_to_the_end_and_the_question_is_no_mitigation(tmp_path: Path):
    with run(tmp_path, *job("no-import", "system", "internal", "system")) as made:
        assert made.end() != 0
        _, second, third = made.events("ended")
        begun = made.events("attempt")[1]
    finding = (
        "NCCL's own test: peer-memory import failed from GPU 0 (rank 0) to GPU 1 (rank 1) (NVL), "
        "1 more failed, 0 of 2 passed"
    )
    assert (second["kind"], second["decided_by"][-1]) == ("nccl-internal-error", finding)
    assert (third["kind"], third["decided_by"][-1]) == (
        "nccl-system-error",
        f"{finding} (attempt 2)",
    )
    assert f"{finding} (attempt 2)" in made.err
    assert begun["mitigations"] == []


@pytest.mark.parametrize(
    ("words", "environ", "had"),
    [
        pytest.param(job("well", "system", "well", version="2.30.7"), {}, "None", id="old"),
        pytest.param(
            job("well", "system", "well"), {"NCCL_RUN_DIAGNOSTICS": "0"}, "0", id="user's own"
        ),
        pytest.param(
            ["--set=mitigate.never=[nccl-diagnostics]", *job("well", "system", "well")],
            {},
            "None",
            id="never",
        ),
    ],
)
def test_it_is_not_asked_for(tmp_path: Path, words: list[str], environ: dict[str, str], had: str):
    with run(tmp_path, *words, env=environ) as made:
        assert made.end() == 0, made.err
    assert asked(made.out) == [f"attempt {number}: asked {had}" for number in (1, 2)]
    assert "nccl-diagnostics" not in made.err
