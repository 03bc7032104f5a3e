"""Runs with one random fault each; tools/fault_trials.py tries as many as one likes."""

import pytest
from cases import slow
from random_faults import Trial, try_one
from rights import needs
from torch_faults import TorchTrial

LIMIT_S = 1500  # the longest takes a minute on an idle machine; a loaded one is no hang
pytestmark = pytest.mark.timeout(2 * LIMIT_S)  # what is left then is looked at, too


@needs("mount")  # one of them mounts a full disk
@pytest.mark.parametrize("number", [3, *slow(*range(7, 27))])
def test_after_a_random_fault_nothing_is_left_or_lost(tmp_path, number):
    assert try_one(Trial(number, tmp_path, LIMIT_S)) == ""


@needs("mount")
@pytest.mark.parametrize("number", slow(2, 6, 10, 13, 23))
def test_after_a_random_fault_a_training_with_torch_ends_right(tmp_path, number):
    assert try_one(TorchTrial(number, tmp_path, LIMIT_S)) == ""
