"""Keep TensorFlow's MirroredStrategy off NCCL where the profile says so, and its sums right.

Targets, TensorFlow 2.15 to 2.21 (Keras 2 and 3):
  tensorflow.python.distribute.mirrored_strategy  cross_device_ops, a second strategy, nested scopes
  tensorflow.python.eager.context, tensorflow.python.framework.config  memory growth, devices that
      were initialised before they were chosen (tensorflow_devices.py)
  tensorflow.python.eager.polymorphic_function.polymorphic_function  the mitigation tf-xla-off
Reason: NCCL of TensorFlow 2.15 fails on RTX 50 cards ("Error invoking NCCL: unhandled cuda error"),
and HierarchicalCopyAllReduce, which does without, adds up wrongly for an odd number of replicas
(tensorflow_findings.py). What the script passes is kept, but for an NcclAllReduce after NCCL has
failed in an earlier attempt (the mitigation tf-hierarchical-copy).
Delete when no TensorFlow in use has an NCCL that its GPUs do not support.

Settings (hooks.tensorflow): cross_device_ops (keep | hierarchical-copy), memory_growth.
"""

from __future__ import annotations

import functools
import os
import sys

from .. import contract, trace
from . import frames, tensorflow_findings
from .tensorflow_devices import Devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType, ModuleType
    from typing import Any, TypeVar

    from ..context import Context

    Result = TypeVar("Result")

_HOOK = "tensorflow"
NO_NCCL = "tf-hierarchical-copy"  # mitigations, by their names in knowledge/mitigations.yaml
NO_XLA = "tf-xla-off"
_REDUCTIONS = "tensorflow.python.distribute.cross_device_ops"
_SCOPES = "tensorflow.python.distribute.distribute_lib"

_state: tuple[Watch, Devices] | None = None  # the target modules of a process share it


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Patch one of the target modules.

    Args:
        name: that of the module.
        module: the module itself.
        context: the process's.
    """
    global _state
    settings = context.hooks["tensorflow"]
    if name.endswith(".polymorphic_function"):
        if NO_XLA in context.mitigations:
            _switch_xla_off(module, context)
        return
    if settings["cross_device_ops"] == "keep" and not settings["memory_growth"]:
        context.receipt(_HOOK, contract.OFF, part=name)
        return
    if _state is None:
        watch = Watch(context)
        _state = watch, Devices(watch, context, growth=settings["memory_growth"])
    watch, devices = _state
    if name.endswith(".context"):
        devices.patch_context(module)
    elif name.endswith(".config"):
        devices.patch_config(module)
    else:
        _patch_strategies(module, watch)


class Watch:
    """The strategies of one process, and which findings were reported."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._replaces = context.hooks["tensorflow"]["cross_device_ops"] == "hierarchical-copy"
        self._reported: set[tuple[int, str]] = set()
        self._first: tuple[int, str] | None = None  # pid and place of the first strategy
        self._ran: set[tuple[int, str]] = set()  # pid and class of each reduction that ran

    def guard(self, step: Callable[..., Result], *args: Any) -> Result | None:
        """Run a step of ours; see `Context.guard`."""
        return self._context.guard(_HOOK, step, *args)

    def report(self, key: str, text: str) -> None:
        """Report a finding once in this process."""
        if (os.getpid(), key) not in self._reported:
            self._reported.add((os.getpid(), key))
            self._context.activate()
            self._context.receipt(_HOOK, contract.OBSERVED, finding=key, text=text)
            self._context.say(text)

    def choose(self, module: ModuleType, given: Any, devices: Any, frame: FrameType) -> Any:
        """Return the reduction that a strategy is to get; None leaves it as the script asked.

        Args:
            module: tensorflow.python.distribute.mirrored_strategy.
            given: the script's own reduction; None where it passed none.
            devices: the script's own devices; None where it passed none.
            frame: the caller's.
        """
        names = _names(module, devices)
        name = tensorflow_findings.reduction(names)
        reductions = sys.modules[_REDUCTIONS]
        place = frames.user_place(frame)
        if len(names) == 1:
            self.report("one-device", tensorflow_findings.single_text(place, names))
        if given is None:
            return getattr(reductions, name)() if name and self._replaces else None
        wrong = len(names) > 1 and len(names) % 2
        if wrong and isinstance(given, reductions.HierarchicalCopyAllReduce):
            self.report("odd-replicas", tensorflow_findings.odd_text(place, len(names)))
        failed_before = NO_NCCL in self._context.mitigations
        if name is None or not (failed_before and isinstance(given, reductions.NcclAllReduce)):
            return None
        text = tensorflow_findings.replaced_text(place, type(given).__name__, name)
        self.report("replaced", text)
        return getattr(reductions, name)()

    def made(self, strategy: Any, chosen: Any, frame: FrameType) -> None:
        """Write the receipt of a strategy, with what it really has; report a second one.

        Args:
            strategy: the MirroredStrategy.
            chosen: the reduction that it was given by us; None: none.
            frame: the script's, where it was made.
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
            self.report("second-strategy", tensorflow_findings.second_text(place, first[1]))

    def entered(self, frame: FrameType) -> None:
        """Report a scope that the script's own code opens inside another one."""
        has_strategy = getattr(sys.modules.get(_SCOPES), "has_strategy", None)
        if has_strategy is not None and has_strategy() and frames.is_users(frame):
            text = tensorflow_findings.nested_text(frames.user_place(frame))
            self.report("nested-scope", text)

    def reduced(self, extended: Any, used: Any) -> None:
        """Note which reduction adds gradients up: under XLA it is not the strategy's own."""
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
            self.report("xla-collective", tensorflow_findings.xla_text(self._first[1]))


def _names(module: ModuleType, devices: Any) -> list[str]:
    """Return the names of a strategy's devices, found as its constructor finds them next.

    Empty where that fails: the constructor says why.
    """
    try:
        found: Iterable[Any] = devices or module.all_local_devices()
        return [str(getattr(device, "name", device)) for device in found]
    except Exception:
        return []


# The patches: each calls the original once, and ours can fail without it.


def _patch_strategies(module: ModuleType, watch: Watch) -> None:
    for name in ("MirroredStrategy", "MirroredStrategyV1"):
        if hasattr(module, name):
            _patch_init(getattr(module, name), module, watch)
            _patch_scope(getattr(module, name), watch)
    if hasattr(module.MirroredExtended, "_get_cross_device_ops"):
        _patch_reduction(module.MirroredExtended, watch)


def _patch_init(cls: Any, module: ModuleType, watch: Watch) -> None:
    import inspect

    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(2)  # `hidden` is between
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # TensorFlow reports what is wrong with the call
            original(self, *args, **kwargs)
            return
        given = bound.arguments.get("cross_device_ops")
        devices = bound.arguments.get("devices")
        chosen = watch.guard(watch.choose, module, given, devices, frame)
        if chosen is not None:
            bound.arguments["cross_device_ops"] = chosen
        original(*bound.args, **bound.kwargs)
        watch.guard(watch.made, self, chosen, frame)

    cls.__init__ = trace.hidden(made)


def _patch_scope(cls: Any, watch: Watch) -> None:
    original = cls.scope

    @functools.wraps(original)
    def scope(self: Any) -> Any:
        watch.guard(watch.entered, sys._getframe(2))
        return original(self)

    cls.scope = trace.hidden(scope)


def _patch_reduction(cls: Any, watch: Watch) -> None:
    original = cls._get_cross_device_ops

    @functools.wraps(original)
    def _get_cross_device_ops(self: Any, value: Any) -> Any:
        used = original(self, value)
        watch.guard(watch.reduced, self, used)
        return used

    cls._get_cross_device_ops = _get_cross_device_ops


def _switch_xla_off(module: ModuleType, context: Context) -> None:
    """Compile no function by XLA, whatever `tf.function(jit_compile=…)` asks for."""
    import inspect

    original = module.function
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # TensorFlow reports what is wrong with the call
            return original(*args, **kwargs)
        if bound.arguments.get("jit_compile"):
            bound.arguments["jit_compile"] = False
            context.activate()
        return original(*bound.args, **bound.kwargs)

    module.function = function  # type: ignore[attr-defined]  # TensorFlow's own is replaced
    context.receipt(_HOOK, contract.APPLIED, part="xla", effective={"jit_compile": False})
