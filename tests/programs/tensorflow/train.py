"""Fit a small Keras model on two logical CPU devices, with the fault that is asked for.

    train.py FAULT STATE

FAULT: none, killed, load-weights, out-of-memory, nccl or xla. STATE: a directory for weights. After
each epoch a line "epoch N loss L" is printed, and "done" at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

EPOCHS = 4
fault, state = sys.argv[1], Path(sys.argv[2])
attempt = int(os.environ.get("SAFERUN_ATTEMPT", "1"))
if fault == "load-weights":
    import tf_keras as keras
else:
    import keras


class Saves(keras.callbacks.Callback):
    """Saves after each epoch, and dies after the second one where that is the fault."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.model.save_weights(state / "w.weights.h5")
        (state / "epoch").write_text(str(epoch + 1), encoding="utf-8")
        print(f"epoch {epoch} loss {float(logs['loss']):.6f}", flush=True)
        if fault == "killed" and attempt == 1 and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Words(keras.layers.Layer):
    """Goes through text, for which XLA has no operation."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.strings.to_number(tf.strings.as_string(x)) * 0.0 + x


def build(strategy: tf.distribute.Strategy) -> keras.Model:
    with strategy.scope():
        extra = [Words()] if fault == "xla" else []
        layers = [keras.layers.Dense(8, activation="relu"), *extra, keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        jit = {"jit_compile": True} if fault == "xla" else {}
        model.compile(keras.optimizers.SGD(0.05), "mse", **jit)
    return model


keras.utils.set_random_seed(3)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
if fault == "xla":  # one replica: XLA's fault is not about several
    strategy = tf.distribute.get_strategy()
elif fault == "nccl":
    own = tf.distribute.NcclAllReduce()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=own)
else:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
model = build(strategy)
x = np.random.default_rng(1).random((64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
first = 0
if (state / "epoch").exists():
    model.load_weights(state / "w.weights.h5")
    first = int((state / "epoch").read_text(encoding="utf-8"))
model.fit(x, y, 16, initial_epoch=first, epochs=EPOCHS, verbose=0, callbacks=[Saves()])
if fault == "load-weights":
    model.load_weights(state / "w.weights.h5")
if fault == "out-of-memory":
    tf.zeros([1 << 45])
print("done", flush=True)
