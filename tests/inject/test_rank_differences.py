"""What ranks disagree on, and how that is reported."""

import pytest

from saferun.inject.rank_differences import (
    argument_difference,
    comparable_arguments,
    compare,
    differences,
    is_reporter,
    ranks_text,
)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], "a process without a rank"),
        ([3], "rank 3"),
        ([1, 3], "ranks 1, 3"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        ([7, 6], "ranks 6-7"),
        (range(0, 20, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, …"),
    ],
)
def test_ranks_are_named_in_runs(members, text):
    assert ranks_text(members) == text


def test_the_rarest_value_is_the_odd_one_and_the_lowest_rank_breaks_ties():
    facts = {rank: {"torch": "b" if rank == 2 else "a"} for rank in range(4)}
    assert differences(facts) == ["rank 2 has torch b, ranks 0-1, 3 have a"]
    facts = {rank: {"torch": "a" if rank < 2 else "b"} for rank in range(4)}
    assert differences(facts) == ["ranks 2-3 have torch b, ranks 0-1 have a"]
    facts = {rank: {"torch": "abbcc"[rank]} for rank in range(5)}
    assert differences(facts) == ["rank 0 has torch a, ranks 1-2 have b, ranks 3-4 have c"]


def test_what_a_rank_does_not_know_is_no_difference():
    assert differences({0: {"gpu": None}, 1: {"gpu": "NVIDIA H100"}, 2: {}}) == []


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["/a/train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["t", "--local_rank=3", "x"], ["t", "x"]),
        (["t", "--local-rank", "3", "x"], ["t", "x"]),
        (["t", "--rank", "3", "--node_rank", "1"], ["t"]),
        (["t", "--api-key", "abc", "--token=abc"], ["t", "--api-key", "***", "--token=***"]),
        ([], []),
    ],
    ids=["path", "equals", "word", "several", "secrets", "none"],
)
def test_arguments_are_compared_without_ranks_paths_and_secrets(argv, arguments):
    assert comparable_arguments(argv) == arguments


@pytest.mark.parametrize(
    ("argvs", "locals_", "reported"),
    [
        ([["t.py", "--device", "cuda:0"], ["t.py", "--device", "cuda:1"]], "01", False),
        ([["t.py", "--log=out.2.txt"], ["t.py", "--log=out.3.txt"]], "23", False),
        ([["t.py", "--lr", "0.1"], ["t.py", "--lr", "0.2"]], "01", True),
        ([["t.py", "--lr", "0.1"], ["t.py", "--lr", "0.1"]], "01", False),
        ([["t.py", "a"], ["t.py"]], "01", True),
    ],
    ids=["device", "log-by-local-rank", "another-rate", "same", "one-more"],
)
def test_arguments_that_only_tell_a_rank_its_number_are_no_difference(argvs, locals_, reported):
    facts = {
        rank: {"argv": argv, "local": local}
        for rank, (argv, local) in enumerate(zip(argvs, locals_, strict=True))
    }
    assert bool(argument_difference(facts)) is reported


def test_one_rank_of_each_node_reports():
    """Of two nodes with four ranks each; 0, 2, 4 and 7 are missing."""
    missing = [0, 2, 4, 7]
    here = [rank for rank in range(8) if rank not in missing]
    assert [r for r in here if is_reporter(r, r % 4, missing)] == [1, 5]


def test_what_all_ranks_read_does_not_grow_with_them():
    facts = {rank: {"torch": "2.13.0", "argv": ["t.py"]} for rank in range(2000)}
    few = {rank: facts[rank] for rank in range(2)}
    assert compare(facts) == compare(few)
