"""Do what the incident's script did: look for devices first, choose them later, nest, repeat."""

import os

import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]  # line: first look
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
os.environ["HARMLESS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # line: variable late
tf.random.set_seed(7)
tf.constant(1.0)  # line: initialised
try:
    tf.config.set_visible_devices([], "CPU")  # line: choice late
except RuntimeError as error:
    print(error)
first = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with first.scope():
    tf.Variable(1.0)
    with first.scope():  # line: nested
        print("inside")
with first.scope():
    tf.Variable(1.0)
odd = tf.distribute.HierarchicalCopyAllReduce()
second = tf.distribute.MirroredStrategy(cross_device_ops=odd)  # line: second and odd
third = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
alone = tf.distribute.MirroredStrategy(["CPU:0"])  # line: alone
print(second.extended._cross_device_ops is odd, alone.num_replicas_in_sync)
