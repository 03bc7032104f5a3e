"""Ranks that train on the same data are named with the loader's line; others hear nothing."""

import pytest
from ranks import Job, RunRanks, line_of
from shard_program import Program
from shard_programs import PROGRAMS

from saferun.inject.hooks.order import shard_findings

QUICK = [("DDP", "no sampler"), ("DDP", "distributed sampler"), ("validation", "a loop of its own")]
CASES = [
    pytest.param(
        program,
        id=f"{program.shape}, {program.case}",
        marks=() if (program.shape, program.case) in QUICK else pytest.mark.slow,
    )
    for program in PROGRAMS
]


def train(run_ranks: RunRanks, program: Program, **setting: str) -> Job:
    """Run it; without a setting of `shards`, the hook is on as it is from the start."""
    if program.needs:
        pytest.importorskip(program.needs)
    environ = {"ACCELERATE_USE_CPU": "true"}
    return run_ranks(program.text(), ranks=program.ranks, environ=environ, **setting)


@pytest.mark.parametrize("program", CASES)
def test_ranks_with_the_same_data_are_named_once_with_the_loaders_line_and_no_others(
    run_ranks, program
):
    job = train(run_ranks, program)
    assert (job.code, job.out.count("done")) == (0, program.ranks), job.err
    if program.warns is bool(program.known):  # RESULTS.md has those that are known to be wrong
        assert job.messages() == []
        return
    (line,) = job.messages()
    if program.warns:
        assert f"train.py:{line_of(program.text(), '# here')}: ranks " in line
    assert f"of {program.ranks} train on the same batches of this DataLoader" in line


@pytest.mark.slow
def test_under_error_the_job_ends_at_the_users_line(run_ranks):
    program = next(program for program in PROGRAMS if program.case == "no sampler")
    job = train(run_ranks, program, shards="error")
    assert job.code == 1
    assert "RuntimeError: " in job.err
    assert "shards.py" not in job.err.split("RuntimeError: ")[0]


# the pure part


def fingerprints(*letters: str) -> dict[int, str]:
    return {rank: f"{letter}1 {letter}2 {letter}3" for rank, letter in enumerate(letters)}


@pytest.mark.parametrize(
    ("letters", "ranks", "names", "expected"),
    [
        ("aabb", [[0, 1], [2, 3]], ("dp", "tp"), []),
        ("aaaa", [[0, 1], [2, 3]], ("dp", "tp"), [0, 2]),
        ("aabb", [[0, 1], [2, 3]], ("dp_replicate", "dp_shard"), [0, 1]),
        ("abab", [[0, 1], [2, 3]], ("pp", "dp"), []),
        ("aaaa", [0, 1, 2, 3], (None,), [0, 1, 2, 3]),
        ("aaaa", [0, 1, 2, 3], ("tp",), []),
        ("aaaa", [[0, 1], [2, 3]], (None, None), []),
        ("abcd", [0, 1, 2, 3], (None,), []),
    ],
)
def test_ranks_that_differ_in_model_dimensions_alone_may_share(letters, ranks, names, expected):
    found = shard_findings.mesh(ranks, names)
    assert shard_findings.same(fingerprints(*letters), [found], []) == expected


def test_in_a_large_job_a_rank_looks_at_few_others():
    assert shard_findings.peers(3, 8) == list(range(8))
    assert len(shard_findings.peers(3, 4096)) < 16
    assert 4 in shard_findings.peers(3, 4096)
