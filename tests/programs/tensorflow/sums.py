"""Print, as JSON, what replicas that hold 1, 2, 3, … add up to, with each reduction.

    sums.py GIVEN...

GIVEN: none, one-device, hierarchical. Printed is
{"COUNT GIVEN": [class of the reduction, [the sum in each replica]]}.
"""

from __future__ import annotations

import json
import sys

import tensorflow as tf

MOST = 5
GIVEN = {
    "none": None,
    "one-device": tf.distribute.ReductionToOneDevice,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
}


def value() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    own = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, own)


def added(count: int, given: str) -> list[object]:
    made = GIVEN[given]
    names = [f"CPU:{number}" for number in range(count)]
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=made and made())
    step = tf.function(lambda: strategy.run(value))
    sums = [float(part) for part in strategy.experimental_local_results(step())]
    return [type(strategy.extended._cross_device_ops).__name__, sums]


cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * MOST)
found = {
    f"{count} {given}": added(count, given)
    for count in range(1, MOST + 1)
    for given in sys.argv[1:]
}
json.dump(found, sys.stdout)
