"""Report objects made in an order that fails with several ranks, once, with the user's line.

Targets, torch >= 2.4: init_process_group (and, with `fix`, is_initialized), `__init__` of
DataLoader, of the shuffling samplers, of DistributedDataParallel and of FullyShardedDataParallel,
and fully_shard.
Reasons: a DataLoader made while `dist.is_initialized()` is still false is not sharded, and every
rank trains on the same data; a model wrapped before the device is set is on cuda:0; DDP around a
compiled module loses the overlap of buckets (DDPOptimizer works on compile around DDP,
https://pytorch.org/docs/stable/notes/ddp.html). Ranks that wrap minutes apart run into the first
collective's time-out, so there is a barrier after wrapping.
Delete a finding when torch reports it itself.

Settings (hooks.order): mode (warn | error | fix | off), wrap_barrier. A false alarm costs more than
a missed one. Loaders of an IterableDataset, loaders that shard themselves or are gone before the
group is made, and groups made by a library (accelerate and Lightning shard loaders afterwards) are
not reported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import hidden_frames, rank
from ...context import Context
from ..init.wrap_barrier import WrapBarrier, group_of_mesh
from .order_watch import OrderWatch

SHUFFLING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")

_state: tuple[OrderWatch, WrapBarrier] | None = None  # shared by the target modules of a process


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Patch one of the target modules.

    Args:
        name: the module's name.
        module: the module itself.
        context: the process's context.
    """
    global _state
    settings = context.hooks.order
    if _state is None:
        _state = OrderWatch(settings, context), WrapBarrier(settings.wrap_barrier, context)
    watch, barrier = _state
    looks = watch.mode != "off"
    if name == rank.C10D and looks:
        _patch_group(module, watch)
    elif name == "torch.utils.data.dataloader" and looks:
        _patch_loaders(module, watch)
    elif name == "torch.nn.parallel.distributed":
        _patch_ddp(module.DistributedDataParallel, watch, barrier)
    elif name.endswith("fully_sharded_data_parallel"):
        _patch_fsdp1(module.FullyShardedDataParallel, watch, barrier)
    elif name.endswith("fully_shard") and hasattr(module, "FSDPState"):  # not a mere re-export
        _patch_fsdp2(module, watch, barrier)


# The patches. Each calls torch's own function once, even if ours fails.


def _patch_group(c10d: ModuleType, watch: OrderWatch) -> None:
    signature = inspect.signature(c10d.init_process_group)

    @hidden_frames.replace(c10d, "init_process_group")
    def init_process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if c10d.GroupMember.WORLD is not None:
            if watch.accepts(c10d, signature, args, kwargs):
                return None
            return original(*args, **kwargs)
        early = watch.guard(watch.early_loader, hidden_frames.caller())
        result = original(*args, **kwargs)
        finding = watch.guard(watch.group_made, early)
        if finding:
            watch.report("early-loader", finding)
        return result

    if watch.mode == "fix":

        @hidden_frames.replace(c10d, "is_initialized")
        def is_initialized(original: Callable[[], Any]) -> Any:
            if c10d.GroupMember.WORLD is None:
                watch.begin_early(hidden_frames.caller())
            return original()


def _patch_loaders(module: ModuleType, watch: OrderWatch) -> None:
    @hidden_frames.replace(module.DataLoader, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        frame = hidden_frames.caller()
        if watch.mode == "fix":
            watch.begin_early(frame)
        original(self, *args, **kwargs)
        finding = watch.guard(watch.saw_loader, self, frame)
        if finding:
            watch.report("early-sampler", finding)

    samplers = sys.modules.get("torch.utils.data.sampler")
    for name in SHUFFLING:
        if hasattr(samplers, name):
            saw = functools.partial(watch.guard, watch.saw_sampler)
            hidden_frames.follow(getattr(samplers, name), "__init__", saw)


def _patch_ddp(cls: Any, watch: OrderWatch, barrier: WrapBarrier) -> None:
    @hidden_frames.replace(cls, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        model = args[0] if args else kwargs.get("module")
        watch.before_wrapping("DDP", model, hidden_frames.caller())
        original(self, *args, **kwargs)
        watch.guard(barrier.wait, getattr(self, "process_group", None))


def _patch_fsdp1(cls: Any, watch: OrderWatch, barrier: WrapBarrier) -> None:
    """Wait after the outermost FSDP: an auto-wrap policy makes others inside its `__init__`.

    There is no wait with hybrid sharding: it has two groups, and neither contains all ranks.
    """
    depth = 0

    @hidden_frames.replace(cls, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        try:
            if depth == 1:
                model = args[0] if args else kwargs.get("module")
                watch.before_wrapping("FSDP", model, hidden_frames.caller())
            original(self, *args, **kwargs)
        finally:
            depth -= 1
        if not depth and not hasattr(self, "_inter_node_pg"):
            watch.guard(barrier.wait, getattr(self, "process_group", None))


def _patch_fsdp2(module: ModuleType, watch: OrderWatch, barrier: WrapBarrier) -> None:
    """Wait after the calls on a module with sharded parts: after the root's, not every block's."""

    def wait(target: Any, kwargs: dict[str, Any]) -> None:
        if _has_sharded_parts(target, getattr(module, "FSDPModule", ())):
            # Nothing is reported: torch runs no collective here, and ranks may be minutes apart.
            barrier.wait(group_of_mesh(kwargs), reports=False)

    @hidden_frames.replace(module, "fully_shard")  # it copies `fully_shard.state`, torch's own
    def fully_shard(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        watch.guard(wait, args[0] if args else kwargs["module"], kwargs)
        return result


def _has_sharded_parts(target: Any, sharded: Any) -> bool:
    parts = target if isinstance(target, (list, tuple)) else [target]
    return any(
        isinstance(child, sharded)
        for part in parts
        for child in part.modules()
        if child is not part
    )
