"""Add up in a step that XLA compiles, on CPU devices that TensorFlow takes for GPUs there.

Only among GPUs does MirroredStrategy leave its reduction aside under XLA. On CPUs the step then
fails, since XLA has no collective over several of them; which reduction it took is known by then.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

mirrored_strategy._is_gpu_device = lambda device: True
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy()  # line: strategy


def value() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    own = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, own)


step = tf.function(lambda: strategy.run(value), jit_compile=True)
try:
    step()
except tf.errors.InvalidArgumentError as error:
    print(type(error).__name__)
