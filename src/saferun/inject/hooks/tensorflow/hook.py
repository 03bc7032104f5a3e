"""Keep TensorFlow's MirroredStrategy off NCCL if the profile asks for that, with right sums.

Targets, TensorFlow 2.15 to 2.21 (Keras 2 and 3):
  tensorflow.python.distribute.mirrored_strategy  cross_device_ops, a second strategy, nested scopes
  tensorflow.python.eager.context, tensorflow.python.framework.config  memory growth, devices that
      were initialised before they were chosen (devices.py)
  tensorflow.python.eager.polymorphic_function.polymorphic_function  the mitigation tf-xla-off
Reason: TensorFlow 2.15's NCCL fails on RTX 50 cards ("Error invoking NCCL: unhandled cuda error"),
and HierarchicalCopyAllReduce, which does not use NCCL, gives wrong sums for an odd number of
replicas (watch.py). The script's own choice is kept, except for NcclAllReduce after NCCL has failed
in an earlier attempt (the mitigation tf-hierarchical-copy).
Delete when no TensorFlow in use has an NCCL that its GPUs do not support.

Settings (hooks.tensorflow): cross_device_ops (keep | hierarchical-copy), memory_growth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import contract, hidden_frames
from ...context import Context
from .devices import Devices
from .watch import DeviceWatch

_HOOK = "tensorflow"
NO_XLA = "tf-xla-off"  # a mitigation's name in knowledge/mitigations.yaml

_state: tuple[DeviceWatch, Devices] | None = None  # shared by the target modules of a process


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Patch one of the target modules.

    Args:
        name: the module's name.
        module: the module itself.
        context: the process's context.
    """
    global _state
    settings = context.hooks.tensorflow
    if name.endswith(".polymorphic_function"):
        if NO_XLA in context.mitigations:
            _switch_xla_off(module, context)
        return
    if settings.cross_device_ops == "keep" and not settings.memory_growth:
        context.receipt(_HOOK, contract.OFF, part=name)
        return
    if _state is None:
        watch = DeviceWatch(context)
        _state = watch, Devices(watch, context, growth=settings.memory_growth)
    watch, devices = _state
    if name.endswith(".context"):
        devices.patch_context(module)
    elif name.endswith(".config"):
        devices.patch_config(module)
    else:
        _patch_strategies(module, watch)


# The patches. Each calls TensorFlow's own function once, even if ours fails.


def _patch_strategies(module: ModuleType, watch: DeviceWatch) -> None:
    for name in ("MirroredStrategy", "MirroredStrategyV1"):
        if hasattr(module, name):
            _patch_init(getattr(module, name), module, watch)
            _patch_scope(getattr(module, name), watch)
    if hasattr(module.MirroredExtended, "_get_cross_device_ops"):
        _patch_reduction(module.MirroredExtended, watch)


def _patch_init(cls: Any, module: ModuleType, watch: DeviceWatch) -> None:
    signature = inspect.signature(cls.__init__)

    @hidden_frames.replace(cls, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        frame = hidden_frames.caller()
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # TensorFlow reports the error in the call
            original(self, *args, **kwargs)
            return
        given = bound.arguments.get("cross_device_ops")
        devices = bound.arguments.get("devices")
        chosen = watch.guard(watch.choose, module, given, devices, frame)
        if chosen is not None:
            bound.arguments["cross_device_ops"] = chosen
        original(*bound.args, **bound.kwargs)
        watch.guard(watch.note_strategy, self, chosen, frame)


def _patch_scope(cls: Any, watch: DeviceWatch) -> None:
    @hidden_frames.replace(cls, "scope")
    def scope(original: Callable[[Any], Any], self: Any) -> Any:
        watch.guard(watch.note_scope, hidden_frames.caller())
        return original(self)


def _patch_reduction(cls: Any, watch: DeviceWatch) -> None:
    @hidden_frames.replace(cls, "_get_cross_device_ops")
    def get_cross_device_ops(original: Callable[[Any, Any], Any], self: Any, value: Any) -> Any:
        used = original(self, value)
        watch.guard(watch.note_reduction, self, used)
        return used


def _switch_xla_off(module: ModuleType, context: Context) -> None:
    """Compile no function with XLA, whatever `tf.function(jit_compile=…)` asks for."""
    signature = inspect.signature(module.function)

    @hidden_frames.replace(module, "function")
    def function(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # TensorFlow reports the error in the call
            return original(*args, **kwargs)
        if bound.arguments.get("jit_compile"):
            bound.arguments["jit_compile"] = False
            context.activate()
        return original(*bound.args, **bound.kwargs)

    context.receipt(_HOOK, contract.APPLIED, part="xla", effective={"jit_compile": False})
