"""Print whether TensorFlow lets GPUs grow, with two that only its list of devices knows of."""

from __future__ import annotations

import json
import os
import sys

import tensorflow as tf
from tensorflow.python import pywrap_tfe

listed = pywrap_tfe.TF_ListPhysicalDevices
looks = []


def with_gpus() -> list[bytes]:
    looks.append(True)
    return [*listed(), b"/physical_device:GPU:0", b"/physical_device:GPU:1"]


pywrap_tfe.TF_ListPhysicalDevices = with_gpus
before = len(looks)
gpus = tf.config.list_physical_devices("GPU")
grows = [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus]
variable = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
json.dump({"before": before, "grows": grows, "variable": variable}, sys.stdout)
