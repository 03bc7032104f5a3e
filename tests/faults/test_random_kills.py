"""Trainings whose ranks are killed at random; tools/resume_trials.py kills as often as you like."""

import subprocess
import sys

import pytest
from cases import slow
from repo import ROOT

pytestmark = pytest.mark.timeout(3000)  # each kill costs a start; a loaded machine is no hang


@pytest.mark.parametrize("program", slow("example", "nanogpt", "nanochat", "accelerate"))
def test_a_training_that_is_killed_at_random_ends_as_if_nobody_had(tmp_path, program):
    trials = [sys.executable, str(ROOT / "tools" / "resume_trials.py"), program]
    options = ["--kills=4", f"--keep={tmp_path}"]
    done = subprocess.run([*trials, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
