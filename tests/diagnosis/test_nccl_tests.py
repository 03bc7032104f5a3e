"""What NCCL's own diagnosis says of the paths between GPUs, in one clause."""

from __future__ import annotations

from saferun.diagnosis import nccl_tests

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
    assert found is not None
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
    outputs = [
        printed(BEGIN, end(2)),
        printed(BEGIN, failed, end(2), process="node0:4715"),
    ]
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
