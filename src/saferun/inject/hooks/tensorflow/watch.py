"""The strategies that a process makes: the reduction of each, and what is wrong with it.

HierarchicalCopyAllReduce splits the replicas into two halves of `count // 2` and adds these up, so
with an odd count it omits the last replica (TensorFlow 2.15 to 2.21,
aggregate_gradients_using_hierarchical_copy in tensorflow/python/distribute/cross_device_utils.py).
Three replicas that hold 1, 2 and 3 give 3. ReductionToOneDevice is right for every count.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any

from ... import contract
from ...context import Context
from .. import frames

_HOOK = "tensorflow"
NO_NCCL = "tf-hierarchical-copy"  # a mitigation's name in knowledge/mitigations.yaml
_REDUCTIONS = "tensorflow.python.distribute.cross_device_ops"
_SCOPES = "tensorflow.python.distribute.distribute_lib"
HIERARCHICAL = "HierarchicalCopyAllReduce"
ONE_DEVICE = "ReductionToOneDevice"


class DeviceWatch:
    """The strategies of one process, and which findings were reported."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.guard = functools.partial(context.guard, _HOOK)
        self._replaces = context.hooks.tensorflow.cross_device_ops == "hierarchical-copy"
        self._reported: set[tuple[int, str]] = set()
        self._first: tuple[int, str] | None = None  # pid and place of the first strategy
        self._ran: set[tuple[int, str]] = set()  # pid and class of each reduction that ran

    def report(self, key: str, text: str) -> None:
        """Report a finding once in this process.

        Args:
            key: identifies the finding in this process.
            text: the finding, for people.
        """
        if (os.getpid(), key) not in self._reported:
            self._reported.add((os.getpid(), key))
            self._context.activate()
            self._context.receipt(_HOOK, contract.OBSERVED, finding=key, text=text)
            self._context.say(text)

    def choose(self, module: ModuleType, given: Any, devices: Any, frame: FrameType) -> Any:
        """Return the reduction that a strategy must get; None leaves the script's choice.

        Args:
            module: tensorflow.python.distribute.mirrored_strategy.
            given: the script's own reduction; None if it passed none.
            devices: the script's own devices; None if it passed none.
            frame: the caller's frame.
        """
        names = _names(module, devices)
        name = reduction(names)
        reductions = sys.modules[_REDUCTIONS]
        place = frames.user_place(frame)
        if len(names) == 1:
            self.report("one-device", single_text(place, names))
        if given is None:
            return getattr(reductions, name)() if name and self._replaces else None
        wrong = len(names) > 1 and len(names) % 2
        if wrong and isinstance(given, reductions.HierarchicalCopyAllReduce):
            text = (
                f"{place}: {HIERARCHICAL} adds up wrongly for {len(names)} replicas (it"
                f" leaves one out); pass tf.distribute.{ONE_DEVICE}(), or no"
                " cross_device_ops"
            )
            self.report("odd-replicas", text)
        failed_before = NO_NCCL in self._context.mitigations
        if name is None or not (failed_before and isinstance(given, reductions.NcclAllReduce)):
            return None
        asked = type(given).__name__
        text = f"{place}: {name} instead of the script's {asked}, since NCCL failed before"
        self.report("replaced", text)
        return getattr(reductions, name)()

    def note_strategy(self, strategy: Any, chosen: Any, frame: FrameType) -> None:
        """Write the receipt of a strategy, with its actual reduction; report a second strategy.

        Args:
            strategy: the MirroredStrategy.
            chosen: the reduction that we gave it; None for none.
            frame: the script's frame that made it.
        """
        place = frames.user_place(frame)
        self._context.activate()
        self._context.receipt(
            _HOOK,
            contract.OBSERVED if chosen is None else contract.APPLIED,
            part="strategy",
            place=place,
            replicas=int(strategy.num_replicas_in_sync),
            effective={"cross_device_ops": type(strategy.extended._cross_device_ops).__name__},
        )
        first = self._first
        if first is None or first[0] != os.getpid():
            self._first = (os.getpid(), place)
        else:
            text = (
                f"{place}: a second MirroredStrategy (the first: {first[1]}): variables of one"
                " cannot be used in the other, and their collectives can collide; make one and"
                " pass it on"
            )
            self.report("second-strategy", text)

    def note_scope(self, frame: FrameType) -> None:
        """Report a scope that the script's own code opens inside another one."""
        has_strategy = getattr(sys.modules.get(_SCOPES), "has_strategy", None)
        if has_strategy is not None and has_strategy() and frames.is_users(frame):
            text = (
                f"{frames.user_place(frame)}: strategy.scope() inside another scope; enter it"
                " once, where the model is built and compiled"
            )
            self.report("nested-scope", text)

    def note_reduction(self, extended: Any, used: Any) -> None:
        """Note which reduction adds up gradients: with XLA it is not the strategy's own.

        Args:
            extended: the strategy's `extended`.
            used: the reduction that adds up the gradients.
        """
        own = getattr(extended, "_cross_device_ops", None)
        is_collective = used is getattr(extended, "_collective_ops", None)
        ran = (os.getpid(), type(used).__name__)
        if ran in self._ran or not (used is own or is_collective):
            return  # integers are always added up on one device
        self._ran.add(ran)
        self._context.receipt(
            _HOOK, contract.OBSERVED, part="reduction", effective={"cross_device_ops": ran[1]}
        )
        if is_collective and used is not own and self._replaces and self._first:
            text = (
                f"{self._first[1]}: XLA compiles the step (jit_compile=True), and there TensorFlow"
                " adds up with CollectiveAllReduce, that is NCCL, whatever the strategy was given;"
                " leave jit_compile out"
            )
            self.report("xla-collective", text)


def _names(module: ModuleType, devices: Any) -> list[str]:
    """Return the names of a strategy's devices, in the way in which its constructor finds them.

    The list is empty if that fails: the constructor reports the reason.
    """
    try:
        found: Iterable[Any] = devices or module.all_local_devices()
        return [str(getattr(device, "name", device)) for device in found]
    except Exception:
        return []


def reduction(devices: Sequence[str]) -> str | None:
    """Return the class that adds correctly without NCCL; None if TensorFlow's own choice does.

    Args:
        devices: names of the strategy's devices, one for each replica. With one device there is
            nothing to add, and for a mix of CPUs and GPUs TensorFlow itself uses
            ReductionToOneDevice.
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
