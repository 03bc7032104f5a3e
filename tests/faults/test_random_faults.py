"""Runs with one random fault each; tests/support/random_faults.py tries as many as one likes."""

from __future__ import annotations

import pytest
import random_faults
from cases import slow
from users import root


@root  # one of them mounts a full disk
@pytest.mark.parametrize("number", [3, *slow(*range(7, 27))])
def test_after_a_random_fault_nothing_is_left_or_lost(tmp_path, number):
    assert random_faults.try_one(number, tmp_path) == ""
