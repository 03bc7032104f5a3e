"""What NCCL's own diagnosis says of the paths between GPUs, in one clause."""

from dataclasses import replace

import pytest
from job_logs import KNOWN

from saferun.diagnosis import nccl_tests
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.nccl_tests import NcclTests

BEGIN = "=== NCCL Diagnostics ==="


def end(size: int) -> str:
    """Return the last line of a report about a communicator of this size."""
    return f"NCCL diagnostics completed in 12.5 ms across {size} ranks"


def path(what: str, source: tuple[int, int], target: tuple[int, int]) -> str:
    """Return the line of a test that failed; each end is a rank and NVML's number of its GPU."""
    ends = (("src", *source), ("dst", *target))
    fields = " ".join(f"{n}Rank={rank} {n}CudaDev=0 {n}NvmlDev={gpu}" for n, rank, gpu in ends)
    return f"[INFO] p2p: {what} {fields} path=SYS handle=LEGACY_CUDA_IPC reason=readLaunch; advice"


def printed(*lines: str, process: str = "node0:4711") -> bytes:
    """Return lines as NCCL prints them, among the job's."""
    texts = [f"{process} NCCL DIAG {line}\n" for line in lines]
    return f"step 1 loss 2.0\n{''.join(texts)}step 2 loss 1.9\n".encode()


def test_paths_that_work_are_counted_once_though_two_outputs_overlap():
    every = "[OK]   p2p: verified P2P access in both directions between every GPU pair"
    output = printed(BEGIN, f"{every} (56 peer accesses)", end(8))
    found = nccl_tests.read([output, output], 8)
    assert found.finding == "NCCL's own test: the paths between GPUs work (56 of 56)"
    assert (found.line, found.completed, found.is_wrong) == ("", True, False)


def test_where_no_gpu_reaches_another_there_is_an_answer_without_a_finding():
    assert nccl_tests.read([b"step 1\n", b""], 2) is None
    skipped = "[OK] net bw: skipped (single host or no network transport)"
    found = nccl_tests.read([printed(BEGIN, skipped, end(2))], 2)
    assert (found.finding, found.completed) == ("", True)


def test_the_gpu_that_is_in_all_paths_that_failed_is_named():
    failed = [path("launch/check failed", (3, 3), (rank, rank)) for rank in (0, 1)]
    failed.append(path("launch/check failed", (2, 2), (3, 3)))
    only = "[INFO] p2p: only 9/12 GPU-to-GPU peer accesses passed verification"
    found = nccl_tests.read([printed(BEGIN, *failed, only, end(4))], 4)
    assert found.finding == (
        "NCCL's own test: launch/check failed from GPU 3 (rank 3) to GPU 0 (rank 0) (SYS), "
        "2 more failed, GPU 3 (rank 3) is in all of them, 9 of 12 passed"
    )
    assert (found.rank, found.is_wrong) == (3, False)
    assert found.line.startswith("node0:4711 NCCL DIAG [INFO] p2p: launch/check failed srcRank=3")


def test_data_that_arrives_wrong_comes_before_paths_that_cannot_be_used():
    failed = [path("launch/check failed", (0, 0), (1, 1)), path("read mismatch", (1, 1), (0, 0))]
    found = nccl_tests.read([printed(BEGIN, *failed, end(2))], 2)
    assert (found.is_wrong, found.completed) == (True, True)
    assert "read mismatch from GPU 1 (rank 1)" in found.finding
    cut = nccl_tests.read([printed(BEGIN, *failed)], 2)
    assert (cut.is_wrong, cut.completed) == (True, False)


def test_ranks_of_a_part_of_the_job_are_not_those_of_the_job():
    failed = path("write mismatch", (0, 4), (1, 5))
    outputs = [printed(BEGIN, end(2)), printed(BEGIN, failed, end(2), process="node0:4715")]
    found = nccl_tests.read(outputs, 8)
    assert found.finding == "NCCL's own test: write mismatch from GPU 4 to GPU 5 (SYS)"
    assert found.rank is None


def test_reports_of_two_processes_may_be_mixed():
    lines = (
        b"n:1 NCCL DIAG === NCCL Diagnostics ===\nn:2 NCCL DIAG === NCCL Diagnostics ===\n"
        b"n:1 NCCL DIAG " + path("write mismatch", (0, 0), (1, 1)).encode() + b"\n"
        b"n:2 NCCL DIAG NCCL diagnostics completed in 3.0 ms across 2 ranks\n"
        b"n:1 NCCL DIAG NCCL diagnostics completed in 3.0 ms across 4 ranks\n"
    )
    assert "GPU 0 (rank 0)" in nccl_tests.read([lines], 4).finding


def test_a_rank_whose_network_is_slow_is_named():
    slow = (
        "[INFO] net bw: cross-nic rank 3 (n0): 265.1 Gbit/s, >30% off median 391.5 Gbit/s in comm"
    )
    found = nccl_tests.read([printed(BEGIN, slow, end(8))], 8)
    assert found.finding == (
        "NCCL's own test: the network of rank 3 (n0) carries 265.1 Gbit/s of 391.5"
    )
    assert found.line == ""


# --- what follows for the diagnosis --------------------------------------------------------------

PATH = NcclTests("no path from 0 to 1", "NCCL DIAG 0 1", 1)
WRONG = replace(PATH, is_wrong=True)


@pytest.mark.parametrize(
    ("kind", "rank", "tests", "before", "expected"),
    [
        ("nccl-timeout", 3, PATH, "", ("nccl-p2p-hang", 3, PATH.line)),
        ("nccl-timeout", 3, WRONG, "", ("gpu-p2p-corrupt", 1, PATH.line)),
        ("nccl-timeout", 3, NcclTests("all work"), "", ("nccl-timeout", 3, "x")),
        ("nccl-timeout", 3, None, "no path in attempt 1", ("nccl-timeout", 3, "x")),
        ("hang", None, PATH, "", ("nccl-p2p-hang", None, PATH.line)),
        ("hang", 3, PATH, "", ("hang", 3, "x")),
        ("peer-lost", 3, PATH, "", ("peer-lost", 3, "x")),
    ],
    ids=["no path", "wrong data", "all work", "before", "hang", "hang of a rank", "no timeout"],
)
def test_a_path_that_failed_is_the_cause_where_no_rank_is(kind, rank, tests, before, expected):
    cures = ("fresh-compile-cache", "nccl-p2p-off")
    told = Diagnosis(kind, "collective", "retry", cures, root_rank=rank, root_line="x")
    found = classify.by_nccl(told, tests, before, KNOWN)
    assert (found.kind, found.root_rank, found.root_line) == expected
    assert found.decided_by[-1] == (before or tests.finding)
    if found.kind == kind:
        assert found.mitigations == (cures[::-1] if tests is PATH else cures)
    other = told._replace(group="memory")
    assert classify.by_nccl(other, tests, before, KNOWN) == other
    assert classify.by_nccl(told, None, "", KNOWN) == told
