"""Which reduction a MirroredStrategy gets. What it then does is tried in tests/tensorflow."""

import pytest

from saferun.inject.hooks.tensorflow import watch

GPUS = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(8)]
CPUS = [name.replace("GPU", "CPU") for name in GPUS]


@pytest.mark.parametrize("names", [GPUS, CPUS], ids=["GPUs", "CPUs"])
def test_an_odd_number_of_replicas_never_gets_hierarchical_copy(names):
    chosen = [watch.reduction(names[:count]) for count in range(1, 9)]
    odd, even = watch.ONE_DEVICE, watch.HIERARCHICAL
    assert watch.reduction([GPUS[0], CPUS[0]]) is None, "TensorFlow chooses"
    assert chosen == [None, even, odd, even, odd, even, odd, even]


def test_one_replica_is_said_by_what_it_runs_on():
    assert "has one GPU" in watch.single_text("t.py:3", GPUS[:1])
    assert "found no GPU" in watch.single_text("t.py:3", CPUS[:1])
