"""Enable memory growth on every GPU before it is initialised, and find early initialisations.

Targets, TensorFlow 2.15 to 2.21: Context._initialize_physical_devices (the first look for devices,
which is when CUDA reads CUDA_VISIBLE_DEVICES) and Context._initialize_logical_devices in
tensorflow.python.eager.context; set_visible_devices in tensorflow.python.framework.config; after
the first look also os.putenv, through which os.environ sets a variable.
Reason: growth and visible devices can be set only before TensorFlow initialises its devices, and a
variable that is set later silently has no effect
(https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth). This hook asks for no device: it
acts only after the script itself has looked for them.
Delete when TensorFlow reports a variable that came too late.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from ... import contract, hidden_frames
from ...context import Context
from .. import frames
from .watch import DeviceWatch

GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"  # read when a GPU is initialised; overrides the configuration
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Devices:
    """When this process's TensorFlow looked for its devices, and when it initialised them."""

    def __init__(self, watch: DeviceWatch, context: Context, *, growth: bool) -> None:
        """Store what reports findings, the process's context and hooks.tensorflow.memory_growth."""
        self._watch = watch
        self._context = context
        self._growth = growth
        self._looked = ""  # "file:line" of the first look
        self._initialised = ""  # "file:line" of their initialisation
        self._visible = ""  # CUDA_VISIBLE_DEVICES at the first look
        self._pid = os.getpid()

    def patch_context(self, module: ModuleType) -> None:
        """Watch a process's Context, and let GPUs take memory as they need it."""
        if self._growth:
            # It is set only here: an exported value is the user's own.
            os.environ.setdefault(GROWTH, "true")
        cls = module.Context
        names = ("_initialize_physical_devices", "_initialize_logical_devices")
        missing = [name for name in names if not hasattr(cls, name)]
        if missing:
            why = f"no Context.{missing[0]} in this TensorFlow"
            self._context.receipt("tensorflow", contract.NOT_NEEDED, part="devices", why=why)
            return
        for name, saw in zip(names, (self._saw_look, self._saw_initialised)):
            hidden_frames.follow(cls, name, functools.partial(self._watch.guard, saw))

    def patch_config(self, module: ModuleType) -> None:
        """Report a choice of devices that TensorFlow refuses because it is too late."""

        @hidden_frames.replace(module, "set_visible_devices")
        def set_visible_devices(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError:
                self._watch.guard(self._saw_late_choice, hidden_frames.caller())
                raise

    def _saw_look(self, context: Any, frame: FrameType) -> None:
        if self._looked or context._physical_devices is None:
            return
        self._looked = frames.user_place(frame)
        self._visible = os.environ.get(VISIBLE, "")
        self._pid = os.getpid()
        if self._growth:
            self._set_growth(context)
        _follow_variables(self._saw_variable, self._watch)

    def _set_growth(self, context: Any) -> None:
        """Let every GPU's memory grow unless the user exported the contrary; read the result."""
        forced = os.environ.get(GROWTH, "")
        growths: dict[Any, bool | None] = context._memory_growth_map
        if forced != "false":  # the only spelling that TensorFlow reads
            for device in [device for device, growth in growths.items() if growth is None]:
                context.set_memory_growth(device, True)
        self._context.activate()
        self._context.receipt(
            "tensorflow",
            contract.OFF if forced == "false" else contract.APPLIED,
            part="memory_growth",
            effective={
                GROWTH: forced,
                **{device.name: bool(growth) for device, growth in growths.items()},
            },
        )

    def _saw_initialised(self, context: Any, frame: FrameType) -> None:
        self._initialised = self._initialised or frames.user_place(frame)

    def _saw_variable(self, name: object, value: object, frame: FrameType) -> None:
        if os.getpid() != self._pid or os.fsdecode(name) != VISIBLE:  # type: ignore[arg-type]  # what os.putenv got
            return
        if os.fsdecode(value) != self._visible:  # type: ignore[arg-type]  # what os.putenv got
            place = frames.user_place(frame)
            text = (
                f"{place}: {VISIBLE} is set after TensorFlow looked for its devices"
                f" ({self._looked}): this process keeps those it found; set it before that line, or"
                " before the job starts"
            )
            self._watch.report("variable-late", text)

    def _saw_late_choice(self, frame: FrameType) -> None:
        first = self._initialised or self._looked or "unknown place"
        text = (
            f"{frames.user_place(frame)}: set_visible_devices comes after TensorFlow initialised"
            f" its devices ({first}) and changes nothing; call it first"
        )
        self._watch.report("choice-late", text)


def _follow_variables(step: Callable[..., None], watch: DeviceWatch) -> None:
    """Call `step` with name, value and the caller's frame before os.environ sets a variable."""

    @hidden_frames.replace(os, "putenv")  # os.environ looks it up at each assignment
    def putenv(original: Callable[..., None], name: Any, value: Any, /) -> None:
        watch.guard(step, name, value, hidden_frames.caller())
        original(name, value)
