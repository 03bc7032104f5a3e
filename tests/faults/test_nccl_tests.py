"""After a failure of NCCL's the next attempt has NCCL test its paths; the answer is evidence."""

from pathlib import Path
from typing import Any

import pytest
from runs import Run, program, run, small_torchrun


def ended(
    folder: Path,
    finding: str,
    *failures: str,
    version: str = "2.32.3",
    never: str = "",
    env: dict[str, str] | None = None,
) -> tuple[Run, list[str], list[dict[str, Any]]]:
    """Run a job that fails so in its attempts.

    Returns: the run, what each attempt had in the variable, and how the attempts ended.
    """
    options = ["--profile=cpu", "--set=retry.backoff_s=[0, 0]", f"--set=mitigate.never=[{never}]"]
    job = ["--nproc-per-node=2", program("nccl_fails"), finding, version, *failures]
    with run(folder, *options, *job, env={**small_torchrun(folder), **(env or {})}) as made:
        status = made.end()
        assert (status == 0) == (failures[-1] == "well"), made.err
        asked = sorted({line for line in made.out.splitlines() if ": asked " in line})
        return made, asked, made.events("ended")


def test_data_that_arrives_wrong_is_the_machines_fault(tmp_path):
    made, asked, (first, last) = ended(tmp_path, "wrong", "system", "internal")
    assert asked == ["attempt 1: asked None", "attempt 2: asked 1"], made.err
    assert (first["kind"], first["action"]) == ("nccl-system-error", "again")
    assert "with nccl-diagnostics (NCCL_RUN_DIAGNOSTICS=1" in made.err
    assert (last["kind"], last["action"], last["root_rank"]) == ("gpu-p2p-corrupt", "stop", None)
    finding = "NCCL's own test: write mismatch from GPU 0 (rank 0) to GPU 1 (rank 1) (NVL)"
    assert finding in last["decided_by"][-1]
    assert finding in made.err
    assert "p2p: write mismatch srcRank=0" in last["root_line"]


def test_an_answer_is_kept_where_the_rank_aborts_and_is_not_asked_for_again(tmp_path):
    made, asked, (first, second, _) = ended(tmp_path, "well", "system", "aborts", "well")
    shown = ["attempt 1: asked None", "attempt 2: asked 1", "attempt 3: asked None"]
    assert asked == shown, made.err
    assert [first["kind"], second["kind"]] == ["nccl-system-error", "nccl-internal-error"]
    assert second["decided_by"][-1] == "NCCL's own test: the paths between GPUs work (2 of 2)"


def test_paths_that_fail_are_told_to_the_end_and_the_question_is_no_mitigation(tmp_path):
    made, _, (_, second, third) = ended(tmp_path, "no-import", "system", "internal", "system")
    finding = (
        "NCCL's own test: peer-memory import failed from GPU 0 (rank 0) to GPU 1 (rank 1) (NVL), "
        "1 more failed, 0 of 2 passed"
    )
    assert (second["kind"], second["decided_by"][-1]) == ("nccl-internal-error", finding)
    kept = f"{finding} (attempt 2)"
    assert (third["kind"], third["decided_by"][-1]) == ("nccl-system-error", kept)
    assert kept in made.err
    assert made.events("attempt")[1]["mitigations"] == []


@pytest.mark.parametrize(
    ("options", "had"),
    [
        pytest.param({"version": "2.30.7"}, "None", id="old"),
        pytest.param({"env": {"NCCL_RUN_DIAGNOSTICS": "0"}}, "0", id="user's own"),
        pytest.param({"never": "nccl-diagnostics"}, "None", id="never"),
    ],
)
def test_it_is_not_asked_for(tmp_path, options, had):
    made, asked, _ = ended(tmp_path, "well", "system", "well", **options)
    assert asked == [f"attempt {number}: asked {had}" for number in (1, 2)]
    assert "nccl-diagnostics" not in made.err
