"""The order in which this process makes objects, and the findings that it has reported."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
import weakref

from ... import contract, rank
from ...fingerprint import fingerprint
from .. import environment, frames
from . import order_findings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import inspect
    from collections.abc import Mapping
    from types import FrameType, ModuleType
    from typing import Any

    from saferun.settings import OrderHook

    from ...context import Context

    Made = tuple[weakref.ref[Any], str]  # a loader or sampler, and the script's line

_LOOK_S = 0.02  # between two reads of its key; requests come only before the first step
_SHARED_S = 5.0  # with `error`: how long a rank waits for another one with the same data


class OrderWatch:
    """The order of events in one process."""

    def __init__(self, settings: OrderHook, context: Context) -> None:
        self.mode = settings.mode
        self._context = context
        self.guard = functools.partial(context.guard, "order")
        self._loaders: list[Made] = []  # made before the group
        self._samplers: list[Made] = []  # shuffling ones made before the group
        self._grouped = False  # this process has had a group
        self._by_library = False  # a library made the group: it may shard the loaders afterwards
        self._reported: set[str] = set()
        self._ours = False  # `fix` made the group, and the script has not yet asked for it
        self._beginning = False

    def report(self, key: str, text: str) -> None:
        """Act on a finding: raise with `error`, else report it once in the whole job.

        Args:
            key: identifies the finding in the whole job.
            text: the finding, for people.
        """
        if self.mode == "error":
            raise RuntimeError(text)
        if key not in self._reported:
            self._reported.add(key)
            self._context.receipt("order", contract.OBSERVED, finding=key, text=text)
            if _is_first_of_all_ranks(key):
                self._context.say(text)

    # loaders and samplers

    def saw_loader(self, loader: Any, frame: FrameType) -> str | None:
        """Note a loader made too early; return a finding for an early sampler in a late loader."""
        if not self._grouped:
            if _is_too_early(os.environ):
                self._loaders.append((weakref.ref(loader), frames.user_place(frame)))
            return None
        if self._by_library or order_findings.shards_itself(loader):
            return None
        for made, place in self._samplers:
            if made() is not None and made() is loader.sampler:
                return _early_text(place, type(loader.sampler).__name__)
        return None

    def saw_sampler(self, sampler: Any, frame: FrameType) -> None:
        """Note a sampler that the script, not torch's DataLoader, made too early."""
        by_torch = frames.is_torch(frame.f_code.co_filename)
        if not self._grouped and not by_torch and _is_too_early(os.environ):
            self._samplers.append((weakref.ref(sampler), frames.user_place(frame)))

    def early_loader(self, frame: FrameType) -> tuple[str, str] | None:
        """Return the finding about the first early loader still in use, or None.

        The text comes with a fingerprint of its dataset, since the script may have divided the
        data.
        """
        self._by_library = frames.called_by_library(frame)
        if self._by_library:
            return None
        for made, place in self._loaders:
            loader = made()
            if loader is not None and not order_findings.shards_itself(loader):
                return _early_text(place, "DataLoader"), _data_of(loader)
        return None

    def group_made(self, found: tuple[str, str] | None) -> str | None:
        """Return the finding if another rank has the same data, which ranks can now compare."""
        self._grouped = True
        self._loaders = []
        self._context.receipt("order", contract.APPLIED, mode=self.mode)
        if found is None:
            return None
        text, data = found
        # The rank that comes second knows that there are two; with `error` all ranks must know.
        return text if _is_shared(data, wait=self.mode == "error") else None

    # the group that `fix` makes

    def begin_early(self, frame: FrameType) -> None:
        """Make the group now, if the script's own code asks for it in a rank that will need one."""
        c10d = sys.modules.get(rank.C10D)
        if c10d is None or c10d.GroupMember.WORLD is not None or self._grouped or self._beginning:
            return
        # Only the direct caller counts: torch and our receipts ask all the time.
        if not frames.is_users(frame) or not _is_rank(os.environ):
            return
        self._beginning = True
        try:
            c10d.init_process_group()
            self._ours = True
        finally:
            self._beginning = False

    def accepts(
        self,
        c10d: ModuleType,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Return whether the script's own init asks for the group that `fix` has made; once.

        Args:
            c10d: torch.distributed.distributed_c10d.
            signature: the signature of init_process_group.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            RuntimeError: the script asks for a group with other ranks or another backend.
        """
        if not self._ours:
            return False
        self._ours = False
        arguments = self.guard(lambda: signature.bind(*args, **kwargs).arguments) or {}
        world = (c10d.get_rank(), c10d.get_world_size())
        backend = str(arguments.get("backend") or "").lower()
        backends = str(c10d.get_backend_config())
        has_backend = all(part in backends for part in backend.split(",") if part)
        if environment.world_of(arguments, os.environ) != world or not has_backend:
            raise RuntimeError(
                "init_process_group asks for another group than hooks.order.mode=fix made early"
                f" (rank {world[0]} of {world[1]}, {backends}); set it to warn for this script"
            )
        if arguments.get("timeout") is not None and hasattr(c10d, "_set_pg_timeout"):
            self.guard(c10d._set_pg_timeout, arguments["timeout"])
        return True

    # wrapping

    def before_wrapping(self, what: str, model: Any, frame: FrameType) -> None:
        """Check a model that is about to be wrapped.

        Args:
            what: "DDP" or "FSDP".
            model: the model.
            frame: the caller's frame.
        """
        if self.mode == "off":
            return
        for key, text in self.guard(_wrap_findings, what, model, frame) or ():
            self.report(key, text)


def _early_text(place: str, what: str) -> str:
    """Return the finding about a loader or sampler, made at "file:line" before the group."""
    return (
        f"{place}: {what} made before init_process_group under WORLD_SIZE"
        f" {os.environ.get('WORLD_SIZE')}: nothing shards its data yet; make it afterwards, with a"
        " DistributedSampler"
    )


def _wrap_findings(what: str, model: Any, frame: FrameType) -> list[tuple[str, str]]:
    findings = []
    place = frames.user_place(frame)
    if what == "DDP" and order_findings.is_compiled(model):
        text = (
            f"{place}: DDP wraps a compiled model, and its communication will not overlap the"
            " backward pass; wrap first, then torch.compile the DDP model"
        )
        findings.append(("compile-before-ddp", text))
    c10d, cuda = sys.modules.get(rank.C10D), sys.modules["torch"].cuda
    if c10d is None or c10d.GroupMember.WORLD is None or not cuda.is_initialized():
        return findings
    local_rank = os.environ.get("LOCAL_RANK")
    devices = {str(parameter.device) for parameter in model.parameters()}
    backend = str(c10d.get_backend_config())
    if order_findings.on_wrong_device(backend, local_rank, cuda.device_count(), devices):
        text = (
            f"{place}: {what} wraps a model on cuda:0 under LOCAL_RANK {local_rank};"
            " call torch.cuda.set_device first"
        )
        findings.append(("wrap-before-device", text))
    return findings


def _data_of(loader: Any) -> str:
    """Return a fingerprint of a dataset's fields; no sample is requested."""
    dataset = loader.dataset
    is_plain = isinstance(dataset, (list, tuple, dict))
    fields = dataset if is_plain else getattr(dataset, "__dict__", {})
    return fingerprint({"type": type(dataset).__qualname__, "fields": fields}) or "nothing"


def _is_shared(data: str, *, wait: bool) -> bool:
    store, key = sys.modules[rank.C10D]._get_default_store(), "saferun/early/" + data
    count: int = store.add(key, 1)
    end = time.monotonic() + _SHARED_S
    while wait and count < 2 and time.monotonic() < end:
        time.sleep(_LOOK_S)
        count = store.add(key, 0)
    return count > 1


def _is_first_of_all_ranks(key: str) -> bool:
    """Return whether this rank is the first with that finding, so that a job reports it once."""
    c10d = sys.modules.get(rank.C10D)
    if c10d is None or c10d.GroupMember.WORLD is None:
        return True
    try:
        count: int = c10d._get_default_store().add("saferun/reported/" + key, 1)
        return count == 1
    except Exception:  # a store that cannot count: better twice than never
        return True


def _is_too_early(environ: Mapping[str, str]) -> bool:
    """Return whether an object made now comes before the group of a job with several ranks."""
    c10d = sys.modules.get(rank.C10D)
    if not environ.get("WORLD_SIZE", "").isdigit() or int(environ["WORLD_SIZE"]) < 2:
        return False
    worker = sys.modules.get("torch.utils.data._utils.worker")
    in_worker = worker is not None and worker._worker_info is not None
    return not in_worker and (c10d is None or c10d.GroupMember.WORLD is None)


def _is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a rank itself: its helpers have RANK, too."""
    mark = environ.get(contract.RANK_MARK)
    return (
        _is_too_early(environ)
        and bool(environ.get("RANK") and environ.get("MASTER_ADDR"))
        and mark in (None, str(os.getpid()))
        and multiprocessing.parent_process() is None
    )
