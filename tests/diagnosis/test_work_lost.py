"""What a failure costs, and how often to save."""

import pytest

from saferun.diagnosis.work_lost import better_interval_s, interval_s, lost
from saferun.model import Checkpoint

CHECKPOINTS = {  # what is lost since then: seconds, steps
    "all of it": (None, 600.0, 130),
    "since the checkpoint": (Checkpoint("out/checkpoint-100", 100, 1480.06), 119.9, 30),
    "epochs are no steps": (Checkpoint("out/step/epoch_3", 3, 1480.0), 120.0, None),
    "a step beside an epoch": (Checkpoint("out/epoch=3-step=100.ckpt", 100, 1480.0), 120.0, 30),
    "no number": (Checkpoint("out/ckpt.pt", -1, 1480.0), 120.0, None),
    "not more than the attempt": (Checkpoint("out/checkpoint-100", 100, 500.0), 600.0, 30),
    "a file server ahead of us": (Checkpoint("out/checkpoint-100", 100, 9000.0), 0.0, 30),
    "a number beyond the steps": (Checkpoint("out/checkpoint-900", 900, 1480.0), 120.0, None),
    "before the first step": (Checkpoint("out/checkpoint-0", 0, 1480.0), 120.0, 130),
    "at the last step": (Checkpoint("out/checkpoint-130", 130, 1480.0), 120.0, 0),
}


@pytest.mark.parametrize(("checkpoint", "s", "steps"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_lost_is_what_came_after_the_checkpoint(checkpoint, s, steps):
    found = lost(130, 1000.0, 600.0, checkpoint, gpus=8)
    path = checkpoint.path if checkpoint else ""
    assert (found.s, found.steps, found.checkpoint) == (s, steps, path)
    assert found.gpu_hours == pytest.approx(s * 8 / 3600, abs=1e-4)
    assert found.gpu_hours == round(found.gpu_hours, 4)


END = 1600.0
IDLE = {  # when all ranks only waited; the seconds that are lost of 120, and those of waiting
    "until the end, seen a look late": ([(1488.0, float("inf"))], 0.0, 112.0),
    "since before the checkpoint": ([(1400.0, float("inf"))], 0.0, 120.0),
    "a while of it": ([(1500.0, 1540.0), (1100.0, 1200.0)], 80.0, 40.0),
}


@pytest.mark.parametrize(("idle", "s", "idle_s"), IDLE.values(), ids=IDLE)
def test_a_wait_for_what_does_not_come_is_no_work(idle, s, idle_s):
    found = lost(130, 1000.0, END - 1000, Checkpoint("ck-130", 130, 1480.0), 8, idle)
    assert (found.s, found.idle_s) == (s, idle_s)
    assert found.gpu_hours == pytest.approx(s * 8 / 3600, abs=1e-4)
    later = lost(133, 1000.0, END - 1000, Checkpoint("ck-130", 130, 1480.0), 8, idle)
    assert later.s == 120 - idle_s, "steps came after the checkpoint"


def test_the_best_interval_is_near_youngs_and_never_longer_than_the_time_between_failures():
    assert interval_s(60.0, 86400.0) == pytest.approx((2 * 60 * 86400) ** 0.5, rel=0.03)
    assert interval_s(100.0, 100.0) == pytest.approx(82.6, abs=0.1)
    assert interval_s(200.0, 100.0) == interval_s(500.0, 100.0) == 100.0


def test_an_interval_is_suggested_after_enough_failures_and_where_it_is_another():
    hourly = [0.0, 3600.0, 7200.0]
    assert better_interval_s([7200.0] * 3, [2.0, 1.0, 10.0, 12.0, 11.0], hourly) == pytest.approx(
        372, abs=1
    )
    assert better_interval_s([7200.0] * 2, [10.0], hourly) is None
    assert better_interval_s([7200.0] * 3, [10.0], [0.0, 400.0, 800.0]) is None
    assert better_interval_s([7200.0] * 3, [10.0], [0.0, 10.0, 20.0]) is not None
    assert better_interval_s([100.0] * 3, [200.0], [0.0, 150.0]) is None
    assert better_interval_s([150.0] * 3, [300.0], [0.0, 100.0]) is None
    assert better_interval_s([7200.0] * 3, [], hourly) is None
    assert better_interval_s([7200.0] * 3, [0.0], hourly) is None
    assert better_interval_s([7200.0] * 3, [10.0], hourly[:1]) is None
