"""How far a job came: the first and the last step in its output, and whether it ran for long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_logs import TRACEBACK, diagnose

from saferun.diagnosis import log_reader, progress
from saferun.diagnosis.progress import HEAD_BYTES, first_step, last_step

OUTPUTS = {
    "plain steps": (b"step 1 loss 3\nstep 2 loss 2\n", 1),
    "resumed": (b"resumed at step 10\nstep 11 loss 3\nstep 12 loss 2\n", 11),
    "logged every hundredth": (b"iter 100: loss 3\niter 200: loss 2\n", 100),
    "nanoGPT resumed": (b"iter 2000: loss 3.1, time 9ms\niter 2010: loss 3.0, time 9ms\n", 2000),
    "a bar": (b"  0%|  | 0/90 [00:00<?]\r  1%|  | 1/90 [00:01<?]\r", 0),
    "a resumed bar": (b" 50%|## | 45/90 [00:00<?]\r 51%|## | 46/90 [00:01<?]\r", 45),
    "loading first": (
        b"Loading shards: 1/3 [00:01]\rLoading shards: 2/3 [00:02]\r"
        b" 50%|##| 500/1000 [00:01<9]\r 50%|##| 501/1000 [00:02<9]\r",
        500,
    ),
    "a dictionary": (b"{'step': 40, 'loss': 1}\n{'step': 50, 'loss': 1}\n", 40),
    "with a time in front": (b"12:00:01 step: 7\n12:00:02 step: 8\n", 7),
    "one number only": (b"step 5 loss 3\n", None),
    "settings": (b"max_steps: 20000\nsave_steps=500\nwarmup steps: 100\n", None),
    "the same number again": (b"step 5 rank 0\nstep 5 rank 1\n", None),
    "nothing": (b"", None),
}


def test_the_first_step_of_an_attempt_is_read_from_the_beginning_of_its_output():
    found = {name: first_step(output) for name, (output, _) in OUTPUTS.items()}
    assert found == {name: step for name, (_, step) in OUTPUTS.items()}


LAST = {
    "plain steps": (b"step 1 loss 3\nstep 2 loss 2\nboom\n", 2),
    "a validation after": (b"step 8\nstep 9\nval batch 1\nval batch 2\n", 9),
    "ranks mixed": (b"step 7 rank 0\nstep 8 rank 0\nstep 7 rank 1\n", 8),
    "a bar": (b" 50%|## | 45/90 [00:00<?]\r 51%|## | 46/90 [00:01<?]\r", 46),
    "settings": (b"max_steps: 20000\nsave_steps=500\nwarmup steps: 100\n", None),
    "nothing": (b"", None),
}


def test_the_last_step_of_an_attempt_is_read_from_the_end_of_its_output():
    found = {name: last_step(output) for name, (output, _) in LAST.items()}
    assert found == {name: step for name, (_, step) in LAST.items()}


def test_the_lines_of_a_log_and_the_bytes_of_an_output_have_the_same_steps():
    for name, (output, step) in OUTPUTS.items():
        log = log_reader.read([output.replace(b"\r", b"\n")])
        steps = progress.steps(log.lines, 0, len(log.lines))
        assert step is None or step in {one.number for one in steps}, name


@pytest.mark.parametrize(
    ("output", "went_on"),
    [
        ("step 1\nstep 2\nstep 3\n", True),
        ("step 1\nstep 2\nstep 2\n", False),
        ("step 3\nstep 2\nstep 1\n", False),
        ("[rank1]: step 1\n[rank1]: step 2\n[rank1]: step 3\n", False),
    ],
    ids=["three steps", "two", "backwards", "of another rank"],
)
def test_three_growing_steps_of_a_rank_mean_that_the_job_went_on(output, went_on):
    lines = log_reader.of_text(output).lines
    assert progress.went_on(progress.steps(lines, 0, len(lines)), 0, None) == went_on


@pytest.mark.parametrize("step", [first_step, last_step])
@given(data=st.binary(max_size=3000))
def test_any_bytes_are_read(step, data):
    assert step(data) is None or step(data) >= 0


def test_only_the_beginning_is_looked_at():
    assert first_step(b"x" * HEAD_BYTES + b"\nstep 1\nstep 2\n") is None


def test_only_the_end_is_looked_at():
    assert last_step(b"step 1\nstep 2\n" + b"x" * HEAD_BYTES) is None


@pytest.mark.parametrize(
    ("age_s", "step", "kind"),
    [
        (20.0, 3, "cuda-illegal-access"),
        (7200.0, None, "cuda-illegal-access-sporadic"),
        (60.0, 9000, "cuda-illegal-access-sporadic"),
    ],
    ids=["at once", "after hours", "after many steps"],
)
def test_how_far_the_job_came_tells_a_sporadic_fault(age_s, step, kind):
    log = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert diagnose(log, age_s=age_s, step=step).kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Epoch: [2][300/7922] loss 1", "cuda-illegal-access"),
        ("Epoch: [19][300/7922] loss 1", "cuda-illegal-access-sporadic"),
        ("    85/299     10.4G   0.05  640:  25%|###", "cuda-illegal-access-sporadic"),
        ("     3/299     10.4G   0.05  640:  25%|###", "cuda-illegal-access"),
    ],
)
def test_epochs_tell_a_sporadic_fault(line, kind):
    log = f"{line}\n{TRACEBACK}RuntimeError: CUDA error: an illegal memory access was encountered"
    assert diagnose(log).kind == kind
