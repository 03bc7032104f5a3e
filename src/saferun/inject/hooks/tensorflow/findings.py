"""Pure: which reduction a MirroredStrategy gets, and the texts of what goes wrong around it.

HierarchicalCopyAllReduce splits the replicas into two halves of `count // 2` and adds these up: of
an odd count it leaves the last replica out (TensorFlow 2.15 to 2.21,
aggregate_gradients_using_hierarchical_copy in tensorflow/python/distribute/cross_device_utils.py).
Three replicas that each hold 1, 2 and 3 give 3. ReductionToOneDevice is right for every count.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

HIERARCHICAL = "HierarchicalCopyAllReduce"
ONE_DEVICE = "ReductionToOneDevice"


def reduction(devices: Sequence[str]) -> str | None:
    """Return the class that adds up without NCCL and rightly; None where TensorFlow's choice does.

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


def odd_text(place: str, count: int) -> str:
    """Return the finding about a script's own HierarchicalCopyAllReduce for an odd count."""
    return (
        f"{place}: {HIERARCHICAL} adds up wrongly for {count} replicas (it leaves one out);"
        f" pass tf.distribute.{ONE_DEVICE}(), or no cross_device_ops"
    )


def replaced_text(place: str, given: str, chosen: str) -> str:
    """Return the remark that the mitigation replaced the script's own reduction.

    Args:
        place: "file:line" of the script.
        given: the class that the script asked for.
        chosen: the class that it gets.
    """
    return f"{place}: {chosen} instead of the script's {given}, since NCCL failed before"


def second_text(place: str, first: str) -> str:
    """Return the finding about a second strategy; both places are "file:line" of the script."""
    return (
        f"{place}: a second MirroredStrategy (the first: {first}): variables of one cannot be used"
        " in the other, and their collectives can collide; make one and pass it on"
    )


def nested_text(place: str) -> str:
    """Return the finding about `scope()` inside a scope."""
    return (
        f"{place}: strategy.scope() inside another scope; enter it once, where the model is built"
        " and compiled"
    )


def xla_text(place: str) -> str:
    """Return the finding that the chosen reduction does not run, made at `place`."""
    return (
        f"{place}: XLA compiles the step (jit_compile=True), and there TensorFlow adds up with"
        " CollectiveAllReduce, that is NCCL, whatever the strategy was given; leave jit_compile out"
    )


def late_variable_text(place: str, first: str, variable: str) -> str:
    """Return the finding about a variable that is set when it is no longer read.

    Args:
        place: "file:line" where it is set.
        first: "file:line" where TensorFlow asked for its devices.
        variable: its name.
    """
    return (
        f"{place}: {variable} is set after TensorFlow looked for its devices ({first}): this"
        " process keeps those it found; set it before that line, or before the job starts"
    )


def late_choice_text(place: str, first: str) -> str:
    """Return the finding about set_visible_devices after the devices were initialised."""
    return (
        f"{place}: set_visible_devices comes after TensorFlow initialised its devices ({first})"
        " and changes nothing; call it first"
    )
