"""Notice ranks that train on the same data, by fingerprints of each loader's first batches.

Target: torch.utils.data.dataloader, DataLoader.__init__, the iterators' __init__ and __next__;
torchdata's StatefulDataLoader.__init__, which does not call that of DataLoader (torchtitan uses
it); torch.distributed.device_mesh, DeviceMesh.__init__. torch >= 2.4.
Reason: a loader without a DistributedSampler, or an IterableDataset that is not split by rank,
makes several ranks do the same work without any error.
Delete when torch reports it itself.

Setting (hooks.shards): off, warn, error. Ranks write their fingerprints to the group's store and
compare them a few batches later, without waiting: no thread, no barrier. Nothing is reported if
equal data may be intended (shard_findings.py), or in validation (no optimizer step between batches,
or gradients are off when they are taken).
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from ... import contract, hidden_frames, rank
from ...context import Context
from ...fingerprint import fingerprint
from .. import frames
from . import order_findings, shard_findings

_HOOK = "shards"
BATCHES = 3  # number of batches of each loader that get a fingerprint
LOOKS = (6, 12, 24, 48)  # batches before which ranks read each other's fingerprints

_meshes: list[shard_findings.Mesh] = []
_watches: list[Loaders] = []  # this process's watch, once torch's loaders are imported


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Watch the loaders, or note the meshes.

    Args:
        name: one of the targets.
        module: that module.
        context: the process's context.
    """
    if context.hooks.shards == "off":
        return
    if name == "torch.distributed.device_mesh":
        if hasattr(module, "DeviceMesh"):
            _note_meshes(module.DeviceMesh, context)
        return
    if name == "torchdata.stateful_dataloader.stateful_dataloader":
        cls = module.StatefulDataLoader  # its base was executed before, and so is watched
        if _watches:
            _watches[0].watch_class(cls)
        return
    iterators = module._BaseDataLoaderIter
    watch = Loaders(context, iterators)
    _watches[:] = [watch]
    watch.watch_class(module.DataLoader)
    watch.watch_iterators()
    context.receipt(_HOOK, contract.APPLIED, setting=context.hooks.shards)


def _note_meshes(cls: Any, context: Context) -> None:
    def note(mesh: Any, frame: FrameType) -> None:
        names = mesh.mesh_dim_names or (None,) * mesh.mesh.ndim
        _meshes.append(shard_findings.mesh(mesh.mesh.tolist(), names))

    hidden_frames.follow(cls, "__init__", functools.partial(context.guard, _HOOK, note))


def _outside(loader: Any, frame: FrameType) -> FrameType:
    """Return the frame that makes the loader, which may be of the script's own class."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_name == "__init__":
        if not any(one is loader for one in outer.f_locals.values()):
            break
        outer = outer.f_back
    return outer or frame


class Batches:
    """The first batches of one loader in one process."""

    def __init__(self, place: str, key: str) -> None:
        self.place = place
        self.key = key  # equal on every rank
        self.part = ""  # the part of the data that the loader's sampler takes
        self.prints: list[str | None] = []
        self.count = 0
        self.steps_before = 0  # optimizer steps when the previous batch was taken
        self.trains = False  # a step came between two batches, with gradients on


class Loaders:
    """The loaders of this process, while they are young.

    Once no iterator is watched, none of our functions is called for a batch or a step.
    """

    def __init__(self, context: Context, iterators: Any) -> None:
        self._context = context
        self._iterators = iterators  # the base class of all iterators
        self._nexts: tuple[Any, Any] | None = None  # its __next__ and ours, while ours is in place
        self._young: weakref.WeakSet[Batches] = weakref.WeakSet()  # batches of living iterators
        self._places: weakref.WeakKeyDictionary[Any, Batches] = weakref.WeakKeyDictionary()
        self._made: dict[str, int] = {}  # place -> number of loaders made there
        self._steps = 0
        self._handle: Any = None
        self._failed = False

    # wrappers

    def watch_class(self, cls: Any) -> None:
        """Note where the loaders of a class are made."""

        note = functools.partial(self._guard, self._note_place)
        hidden_frames.follow(cls, "__init__", note)

    def watch_iterators(self) -> None:
        """Watch the first iterator of each loader."""

        @hidden_frames.replace(self._iterators, "__init__")
        def make(original: Callable[..., None], iterator: Any, loader: Any, **kwargs: Any) -> None:
            original(iterator, loader, **kwargs)
            iterator._saferun_batches = self._guard(self._begin, loader)

    def _watch_batches(self) -> None:
        before = self._iterators.__next__

        @hidden_frames.replace(self._iterators, "__next__")
        def following(original: Callable[[Any], Any], iterator: Any) -> Any:
            try:
                batch = original(iterator)
                batches = getattr(iterator, "_saferun_batches", None)
                if batches is not None:
                    finding = self._guard(self._note_batch, iterator, batches, batch)
                    if finding:
                        self._report(finding, batches.key)
            except BaseException:  # usually StopIteration at the end of the data
                self._end(iterator)
                raise
            return batch

        self._nexts = (before, following)

    def _guard(self, step: Any, *args: Any) -> Any:
        if self._failed:
            return None
        try:
            return step(*args)
        except Exception as error:  # for example a lost store, or a batch of an odd type
            self._failed = True
            self._rest()
            self._context.failed(_HOOK, error)
            return None

    # what they note

    def _note_place(self, loader: Any, frame: FrameType) -> None:
        place = frames.user_place(_outside(loader, frame))
        count = self._made[place] = self._made.get(place, 0) + 1
        key = hashlib.blake2b(f"{place} {count}".encode(), digest_size=8).hexdigest()
        self._places[loader] = Batches(place, key)

    def _begin(self, loader: Any) -> Batches | None:
        batches = self._places.pop(loader, None)
        worker = sys.modules.get("torch.utils.data._utils.worker")
        if worker is not None and worker._worker_info is not None:
            return None  # a loader inside a dataset: the store's connection is the parent's
        if batches is not None:
            batches.part = shard_findings.part(order_findings.samplers(loader))
            self._young.add(batches)
            if self._nexts is None:
                self._watch_batches()
        return batches

    def _end(self, iterator: Any) -> None:
        """Stop watching an iterator; after the last one, remove our functions."""
        batches = getattr(iterator, "_saferun_batches", None)
        if batches is not None:
            iterator._saferun_batches = None
            self._young.discard(batches)
        if not self._young:
            self._rest()

    def _rest(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._nexts is not None and self._iterators.__next__ is self._nexts[1]:
            self._iterators.__next__ = self._nexts[0]
            self._nexts = None

    def _note_batch(self, iterator: Any, batches: Batches, batch: Any) -> str | None:
        c10d = sys.modules.get(rank.C10D)
        if c10d is None or not rank.group_is_initialised() or c10d.get_world_size() < 2:
            self._end(iterator)
            return None
        self._count_steps()
        batches.count += 1
        stepped = batches.count > 1 and self._steps > batches.steps_before
        batches.trains |= stepped and sys.modules["torch"].is_grad_enabled()
        batches.steps_before = self._steps
        if len(batches.prints) < BATCHES:
            batches.prints.append(fingerprint(batch))
            if len(batches.prints) == BATCHES:
                self._publish(c10d, batches)
        if batches.count not in LOOKS:
            return None
        found = self._compare_with_peers(c10d, batches) if batches.trains else None
        if found is not None or batches.count == LOOKS[-1]:
            self._end(iterator)
        return found

    def _publish(self, c10d: Any, batches: Batches) -> None:
        store, own = c10d._get_default_store(), c10d.get_rank()
        text = shard_findings.encode(batches.part, batches.prints)
        store.set(f"saferun/shards/{batches.key}/{own}", text)

    def _compare_with_peers(self, c10d: Any, batches: Batches) -> str | None:
        """Return the finding; "" if all ranks are there and differ, None to look again."""
        store, size = c10d._get_default_store(), c10d.get_world_size()
        peers = shard_findings.peers(c10d.get_rank(), size)
        there = {one: f"saferun/shards/{batches.key}/{one}" for one in peers}
        if not store.check(list(there.values())):  # one request, usually the only one
            there = {one: key for one, key in there.items() if store.check([key])}
        found = store.multi_get(list(there.values()))
        texts = {one: text.decode() for one, text in zip(there, found)}
        groups = shard_findings.groups(c10d._world, size)
        same = shard_findings.same(texts, _meshes, groups)
        if same:
            ranks = ", ".join(map(str, same[:8])) + (", …" if len(same) > 8 else "")
            return (
                f"{batches.place}: ranks {ranks} of {size} train on the same batches of this"
                " DataLoader; give it a DistributedSampler, or split an IterableDataset by rank"
                " (hooks.shards)"
            )
        return "" if len(there) == len(peers) else None

    # optimizer steps

    def _count_steps(self) -> None:
        optimizer = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if self._handle is None and register is not None:
            self._handle = register(self._stepped)

    def _stepped(self, *_: object) -> None:
        self._steps += 1

    def _report(self, finding: str, key: str) -> None:
        if self._context.hooks.shards == "error":
            raise RuntimeError(finding)
        self._guard(self._say, finding, key)

    def _say(self, finding: str, key: str) -> None:
        self._context.receipt(_HOOK, contract.OBSERVED, finding=finding)
        store = sys.modules[rank.C10D]._get_default_store()
        # Report once for each loader: an early rank may know of other ranks than a later one.
        if store.add(f"saferun/shards/reported/{key}", 1) == 1:
            self._context.say(finding)
