"""Hosts struck at random, and brought back; tools/node_trials.py tries as many as one likes."""

import os

import pytest
from node_faults import FAULTS, Trial
from rights import needs

pytestmark = [needs("make networks"), pytest.mark.slow, pytest.mark.timeout(3000)]
STRUCK = int(os.environ.get("SAFERUN_TEST_STRIKES", "6"))


@pytest.mark.parametrize("number", range(STRUCK))
def test_hosts_that_are_struck_train_the_same_weights_or_say_truly_why_not(tmp_path, number):
    trial = Trial(number, tmp_path, limit_s=2500)  # of a busy machine
    faults = [found for found in trial.go() if found[0] in FAULTS]
    assert not faults, (str(trial.plan), trial.log)
