"""Pure: which reduction a MirroredStrategy gets.

HierarchicalCopyAllReduce splits the replicas into two halves of `count // 2` and adds these up: of
an odd count it leaves the last replica out (TensorFlow 2.15 to 2.21,
aggregate_gradients_using_hierarchical_copy in tensorflow/python/distribute/cross_device_utils.py).
Three replicas that each hold 1, 2 and 3 give 3. ReductionToOneDevice is right for every count.
"""

from __future__ import annotations

from collections.abc import Sequence

HIERARCHICAL = "HierarchicalCopyAllReduce"
ONE_DEVICE = "ReductionToOneDevice"


def reduction(devices: Sequence[str]) -> str | None:
    """Return the class that adds up rightly without NCCL; None where TensorFlow's own choice does.

    Args:
        devices: names of the strategy's devices, one for each replica. With one there is nothing to
            add up, and among CPUs and GPUs mixed TensorFlow itself takes ReductionToOneDevice.
    """
    gpus = count_gpus(devices)
    if len(devices) < 2 or 0 < gpus < len(devices):
        return None
    return ONE_DEVICE if len(devices) % 2 else HIERARCHICAL


def count_gpus(devices: Sequence[str]) -> int:
    """Return how many of the devices are GPUs."""
    return sum("gpu" in name.lower() for name in devices)


def single_text(place: str, devices: Sequence[str]) -> str:
    """Return the remark about a strategy with one device, made at "file:line" of the script."""
    if count_gpus(devices):
        return f"{place}: MirroredStrategy has one GPU, hence one replica: it runs as without it"
    return f"{place}: MirroredStrategy found no GPU: it has one replica, on the CPU"
