"""Which reduction a MirroredStrategy gets. What it then does is tried in tests/tensorflow."""

from __future__ import annotations

import pytest

from saferun.inject.hooks.tensorflow import findings as findings

GPUS = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(8)]
CPUS = [name.replace("GPU", "CPU") for name in GPUS]


@pytest.mark.parametrize("names", [GPUS, CPUS], ids=["GPUs", "CPUs"])
def test_an_odd_number_of_replicas_never_gets_hierarchical_copy(names):
    chosen = [findings.reduction(names[:count]) for count in range(1, 9)]
    odd, even = findings.ONE_DEVICE, findings.HIERARCHICAL
    assert chosen == [None, even, odd, even, odd, even, odd, even]


def test_among_gpus_and_cpus_mixed_tensorflow_chooses():
    assert findings.reduction([GPUS[0], CPUS[0]]) is None


def test_one_replica_is_said_by_what_it_runs_on():
    assert "has one GPU" in findings.single_text("t.py:3", GPUS[:1])
    assert "found no GPU" in findings.single_text("t.py:3", CPUS[:1])
