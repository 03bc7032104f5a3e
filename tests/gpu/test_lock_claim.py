"""Slots and MIG slices: who may share a GPU with whom."""

import pytest
from lock_runs import CUT, SLICE_1, SLICE_2, A

# Slots


@pytest.mark.parametrize(
    ("there", "newcomer", "gets_in"),
    [
        pytest.param([3, 3], 3, True, id="third-of-three"),
        pytest.param([3, 3, 3], 3, False, id="fourth-of-three"),
        pytest.param([4], 2, True, id="wants-at-most-two-and-is-second"),
        pytest.param([4, 4], 2, False, id="wants-at-most-two-and-is-third"),
        pytest.param([2, 4], 4, False, id="one-there-wants-at-most-two"),
        pytest.param([4, 2], 4, False, id="one-there-came-later-and-wants-at-most-two"),
        pytest.param([1], 3, False, id="one-there-wants-to-be-alone"),
        pytest.param([3], 1, False, id="wants-to-be-alone"),
    ],
)
def test_a_gpu_is_shared_by_no_more_runs_than_each_of_them_allows(
    holds, outcome, there, newcomer, gets_in
):
    for slots in there:
        holds(A, slots=slots)
    assert ("held" in outcome(A, slots=newcomer)) == gets_in


def test_a_slot_that_is_free_below_one_that_is_held_does_not_make_the_count_wrong(holds, outcome):
    runs = [holds(A, slots=3) for _ in range(3)]
    runs[0].end()
    assert "held" in outcome(A, slots=3)
    assert "busy" in outcome(A, slots=2)


def test_a_run_that_wants_to_be_alone_is_safe_from_sharers_even_if_its_record_is_lost(
    holds, outcome, shared
):
    holds(A)
    for record in (shared / "lock").glob("holder.*"):
        record.unlink()
    assert "busy" in outcome(A, slots=3)


def test_the_run_after_the_last_slot_waits_for_one(holds, start):
    first, _ = holds(A, slots=2), holds(A, slots=2)
    third = start(A, slots=2, mode="wait", wait_s=60, aloud=True)
    third.answer()
    first.end()
    assert "held" in third.answer()


# MIG


def test_two_slices_of_one_gpu_run_side_by_side(holds):
    holds(SLICE_1, parents=CUT)
    assert holds(SLICE_2, parents=CUT).first_words["messages"] == []


@pytest.mark.parametrize(
    ("there", "newcomer"),
    [(SLICE_1, SLICE_1), (SLICE_1, A), (A, SLICE_1)],
    ids=["the-same-slice", "the-whole-after-a-slice", "a-slice-after-the-whole"],
)
@pytest.mark.parametrize("slots", [1, 2], ids=["alone", "sharing"])
def test_a_slice_is_held_alone_and_the_whole_gpu_excludes_slices(
    holds, outcome, there, newcomer, slots
):
    first = holds(there, parents=CUT, slots=slots if there == A else 1)
    busy = outcome(newcomer, parents=CUT, slots=slots if newcomer == A else 1)["busy"]
    assert f"pid {first.pid} of user " in busy
