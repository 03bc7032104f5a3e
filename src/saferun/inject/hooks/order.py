"""Things made in an order that goes wrong under several ranks: said once, with the user's line.

Targets, torch >= 2.4: init_process_group (and, under `fix`, is_initialized), DataLoader.__init__
and the shuffling samplers', DistributedDataParallel.__init__, FullyShardedDataParallel.__init__,
fully_shard.
Reasons: a DataLoader made while `dist.is_initialized()` is still false is not sharded, and every
rank trains on the same data; a model wrapped before the device is set lands on cuda:0; DDP around
a compiled module loses the overlap of buckets (DDPOptimizer works on compile around DDP,
https://pytorch.org/docs/stable/notes/ddp.html). Ranks that wrap minutes apart run into the first
collective's time-out: hence a barrier after wrapping.
Delete a finding when torch says it itself.

Settings (hooks.order): mode (warn | error | fix | off), wrap_barrier. A false alarm costs more
than a missed one: loaders of an IterableDataset, those that shard themselves, those thrown away
before the group is made, and groups made by a library (accelerate and Lightning shard loaders
afterwards) are not said.
"""

from __future__ import annotations

import os
import sys

from _saferun_inject import contract
from _saferun_inject import store as meetings
from _saferun_inject.hooks import init

WRAP_BARRIER_S = 60.0
WRAP_BARRIERS = 8  # for each group; a model with hundreds of wrapped blocks needs no more
SHARDING = ("num_replicas", "rank", "num_processes", "process_index", "world_size", "num_shards")
CHOSEN = ("indices", "_indices")  # Subset and its like: the script may have dealt them out itself
SHUFFLING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
C10D = "torch.distributed.distributed_c10d"

_watches = {}  # one for each context: the modules of one process share what they saw


def apply(name, module, context):
    """Patch one of the target modules, right after its execution."""
    settings = context.hooks.get("order")
    if not settings:
        return
    watch = _watches.setdefault(id(context), Watch(settings, context))
    looks = watch.mode != "off"
    if name == C10D and looks:
        _patch_group(module, watch)
    elif name == "torch.utils.data.dataloader" and looks:
        _patch_loaders(module, watch)
    elif name == "torch.nn.parallel.distributed":
        _patch_ddp(module.DistributedDataParallel, watch)
    elif name.endswith("fully_sharded_data_parallel"):
        _patch_fsdp1(module.FullyShardedDataParallel, watch)
    elif name.endswith("fully_shard"):
        _patch_fsdp2(module, watch)


# The patches: each calls the original once, and ours can fail without it.


def _patch_group(c10d, watch):
    import functools
    import inspect

    original = c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        if c10d.GroupMember.WORLD is not None:
            if watch.accepts(c10d, signature, args, kwargs):
                return None
            return original(*args, **kwargs)
        finding = watch.guard(watch.early_loader, sys._getframe(1))
        if finding and watch.mode == "error":
            raise RuntimeError(finding)
        result = original(*args, **kwargs)
        watch.guard(watch.group_made, finding)
        return result

    c10d.init_process_group = init_process_group
    if watch.mode == "fix":
        _patch_query(c10d, watch)


def _patch_query(c10d, watch):
    import functools

    original = c10d.is_initialized

    @functools.wraps(original)
    def is_initialized():
        if c10d.GroupMember.WORLD is None:
            watch.begin_early(sys._getframe(1))
        return original()

    c10d.is_initialized = is_initialized


def _patch_loaders(module, watch):
    import functools

    original = module.DataLoader.__init__

    @functools.wraps(original)
    def made(self, *args, **kwargs):
        if watch.mode == "fix":
            watch.begin_early(sys._getframe(1))
        original(self, *args, **kwargs)
        finding = watch.guard(watch.saw_loader, self, sys._getframe(1))
        if finding:
            watch.tell("early-sampler", finding)

    module.DataLoader.__init__ = made
    samplers = sys.modules.get("torch.utils.data.sampler")
    for name in SHUFFLING:
        if hasattr(samplers, name):
            _patch_sampler(getattr(samplers, name), watch)


def _patch_sampler(cls, watch):
    import functools

    original = cls.__init__

    @functools.wraps(original)
    def made(self, *args, **kwargs):
        original(self, *args, **kwargs)
        watch.guard(watch.saw_sampler, self, sys._getframe(1))

    cls.__init__ = made


def _patch_ddp(cls, watch):
    import functools

    original = cls.__init__

    @functools.wraps(original)
    def made(self, *args, **kwargs):
        module = args[0] if args else kwargs.get("module")
        watch.before_wrapping("DDP", module, sys._getframe(1))
        original(self, *args, **kwargs)
        watch.guard(watch.after_wrapping, getattr(self, "process_group", None))

    cls.__init__ = made


def _patch_fsdp1(cls, watch):
    """An auto-wrap policy makes FSDP modules inside FSDP's own __init__: only the outermost counts.

    Under hybrid sharding there are two groups, and a barrier of neither is one of all.
    """
    import functools

    original = cls.__init__
    inside = [0]

    @functools.wraps(original)
    def made(self, *args, **kwargs):
        if not inside[0]:
            module = args[0] if args else kwargs.get("module")
            watch.before_wrapping("FSDP", module, sys._getframe(1))
        inside[0] += 1
        try:
            original(self, *args, **kwargs)
        finally:
            inside[0] -= 1
        if not inside[0] and not hasattr(self, "_inter_node_pg"):
            watch.guard(watch.after_wrapping, getattr(self, "process_group", None))

    cls.__init__ = made


def _patch_fsdp2(module, watch):
    """A barrier after the calls on a module with sharded parts: the root's, not every block's."""
    import functools

    original = module.fully_shard

    @functools.wraps(original)  # `fully_shard.state`, which torch uses, comes along in __dict__
    def fully_shard(target, *args, **kwargs):
        result = original(target, *args, **kwargs)
        if _has_sharded_parts(target, getattr(module, "FSDPModule", ())):
            # no collective here and none in torch: ranks may be minutes apart, and that is no news
            watch.guard(watch.after_wrapping, _group_of_mesh(kwargs), False)
        return result

    module.fully_shard = fully_shard


def _has_sharded_parts(target, sharded):
    parts = target if isinstance(target, (list, tuple)) else [target]
    return any(
        isinstance(child, sharded)
        for part in parts
        for child in part.modules()
        if child is not part
    )


def _group_of_mesh(kwargs):
    """Return the group of a one-dimensional mesh, the default group's for none, else None."""
    if kwargs.get("dp_mesh_dims") is not None:
        return None
    mesh = kwargs.get("mesh")
    if mesh is None:
        return sys.modules[C10D].GroupMember.WORLD
    return mesh.get_group() if mesh.ndim == 1 else None


class Watch:
    """What this process made, in which order, and what was said about it."""

    def __init__(self, settings, context):
        self.mode = settings.get("mode", "warn")
        self.wrap_barrier = settings.get("wrap_barrier", True)
        self.context = context
        self.loaders = []  # (weak reference, place), made before there was a group
        self.samplers = []  # the same for shuffling samplers
        self.grouped = False  # this process has had a group
        self.by_library = False  # and a library made it: it may shard the loaders afterwards
        self.told = set()
        self.ours = False  # `fix` made the group, and the script has not asked for it yet
        self.beginning = False
        self.wraps = {}  # group name -> barriers so far
        self.gave_up = False

    def guard(self, step, *args):
        """Run a step of ours: whatever it raises is one line, and the job goes on."""
        try:
            return step(*args)
        except Exception as error:
            self.context.failed("order", error)
            return None

    def tell(self, key, text):
        """Act on a finding: raise under `error`, else say it once in the whole job."""
        if self.mode == "error":
            raise RuntimeError(text)
        if key not in self.told:
            self.told.add(key)
            self.context.receipt("order", contract.OBSERVED, finding=key, text=text)
            if _first_of_all_ranks(key):
                self.context.say(text)

    # loaders and samplers

    def saw_loader(self, loader, frame):
        """Remember a loader made too early; return a finding for an early sampler in a late one."""
        import weakref

        if not self.grouped:
            if _too_early(os.environ):
                self.loaders.append((weakref.ref(loader), user_place(frame)))
            return None
        if self.by_library or shards_itself(loader):
            return None
        for made, place in self.samplers:
            if made() is not None and made() is loader.sampler:
                return early_text(place, type(loader.sampler).__name__, os.environ["WORLD_SIZE"])
        return None

    def saw_sampler(self, sampler, frame):
        """Remember a sampler that the script, not torch's DataLoader, made too early."""
        import weakref

        if not self.grouped and not _is_torch(frame.f_code.co_filename) and _too_early(os.environ):
            self.samplers.append((weakref.ref(sampler), user_place(frame)))

    def early_loader(self, frame):
        """Return the finding about the first early loader that is still in use, or None."""
        self.by_library = called_by_library(frame)
        if self.by_library:
            return None
        for made, place in self.loaders:
            loader = made()
            if loader is not None and not shards_itself(loader):
                return early_text(place, "DataLoader", os.environ.get("WORLD_SIZE"))
        return None

    def group_made(self, finding):
        """Say the finding, now that there is a group to agree on one speaker."""
        self.grouped = True
        self.loaders = []
        self.context.receipt("order", contract.APPLIED, mode=self.mode)
        if finding:
            self.tell("early-loader", finding)

    # the group that `fix` makes

    def begin_early(self, frame):
        """Make the group now, if the script's own code asks in a rank that will need one."""
        c10d = sys.modules.get(C10D)
        if c10d is None or c10d.GroupMember.WORLD is not None or self.grouped or self.beginning:
            return
        name = frame.f_code.co_filename  # the very caller: torch and our receipts ask all the time
        if _is_torch(name) or _is_ours(name) or _is_library(name) or not _is_rank(os.environ):
            return
        self.beginning = True
        try:
            c10d.init_process_group()
            self.ours = True
        finally:
            self.beginning = False

    def accepts(self, c10d, signature, args, kwargs):
        """Tell whether the script's own init asks for the group that we have made: once."""
        if not self.ours:
            return False
        self.ours = False
        arguments = self.guard(lambda: signature.bind(*args, **kwargs).arguments) or {}
        world = (c10d.get_rank(), c10d.get_world_size())
        if init.world_of(arguments, os.environ) != world:
            self.context.say(
                "init_process_group asks for another group than hooks.order.mode=fix made early"
                " (rank %d of %d); set it to warn for this script" % world
            )
            return False
        if arguments.get("timeout") is not None and hasattr(c10d, "_set_pg_timeout"):
            self.guard(c10d._set_pg_timeout, arguments["timeout"])
        return True

    # wrapping

    def before_wrapping(self, what, module, frame):
        """Look at a model that is about to be wrapped."""
        if self.mode == "off":
            return
        for key, text in self.guard(_wrap_findings, what, module, frame) or ():
            self.tell(key, text)

    def after_wrapping(self, group, tell=True):
        """Wait, bounded, for the ranks of exactly this group; `tell` of those that do not come."""
        c10d = sys.modules.get(C10D)
        if not self.wrap_barrier or self.gave_up or group is None or c10d is None:
            return
        if group.size() < 2 or not _real(c10d, group):
            return
        name = c10d._get_process_group_name(group)
        turn = self.wraps[name] = self.wraps.get(name, 0) + 1
        if turn > WRAP_BARRIERS:
            return
        store = init.own_connection(c10d._get_process_group_store(group))
        room = c10d.PrefixStore("saferun/wrap/%d" % turn, store)
        rank, size = group.rank(), group.size()
        verdict = meetings.meet(room, rank, size, {}, _speaker, WRAP_BARRIER_S)
        if not verdict["missing"]:
            meetings.leave(room, rank, size)
            return
        self.gave_up = True
        if tell and rank == verdict["speaker"]:
            absent = [c10d.get_global_rank(group, rank) for rank in verdict["missing"]]
            text = "%s did not wrap the model within %g s; the job goes on, without such barriers"
            self.context.say(text % (init.ranks_text(absent), WRAP_BARRIER_S))


# What is a finding: pure.


def early_text(place, what, world_size):
    """Return what is said about a loader or sampler made before the group."""
    return (
        "%s: %s made before init_process_group under WORLD_SIZE %s: nothing shards its data yet;"
        " make it afterwards, with a DistributedSampler" % (place, what, world_size)
    )


def shards_itself(loader):
    """Tell whether a loader's sampler or dataset knows its rank, or may (IterableDataset)."""
    batches = getattr(loader, "batch_sampler", None)
    inner = (getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None))
    parts = (getattr(loader, "sampler", None), batches, *inner, getattr(loader, "dataset", None))
    if any(hasattr(part, name) for part in parts for name in SHARDING):
        return True
    if any(hasattr(parts[-1], name) for name in CHOSEN):
        return True
    return any(cls.__name__ == "IterableDataset" for cls in type(parts[-1]).__mro__)


def on_wrong_device(backend, local_rank, device_count, devices):
    """Tell whether a model lies on cuda:0 though its rank has a GPU of its own.

    Args:
        backend: the group's, as torch names it ("nccl", "cpu:gloo,cuda:nccl").
        local_rank: the text of LOCAL_RANK, or None.
        device_count: visible CUDA devices.
        devices: the devices of the parameters, as text.
    """
    if "nccl" not in backend or not (local_rank or "").isdigit() or int(local_rank) == 0:
        return False
    return device_count > int(local_rank) and set(devices) == {"cuda:0"}


def is_compiled(module):
    """Tell whether a module is what `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule" and "_dynamo" in type(module).__module__


def _speaker(facts):
    return {"speaker": min(facts)}


# The edge: frames, environment, torch.


def _wrap_findings(what, module, frame):
    findings = []
    if what == "DDP" and is_compiled(module):
        text = "%s: DDP wraps a compiled model, and its communication will not overlap the backward"
        text += " pass; wrap first, then torch.compile the DDP model"
        findings.append(("compile-before-ddp", text % user_place(frame)))
    local_rank = os.environ.get("LOCAL_RANK")
    c10d, torch = sys.modules.get(C10D), sys.modules["torch"]
    if c10d is None or c10d.GroupMember.WORLD is None or not torch.cuda.is_initialized():
        return findings
    devices = {str(parameter.device) for parameter in module.parameters()}
    backend = c10d.get_backend_config()
    if on_wrong_device(str(backend), local_rank, torch.cuda.device_count(), devices):
        text = (
            "%s: %s wraps a model on cuda:0 under LOCAL_RANK %s; call torch.cuda.set_device first"
        )
        findings.append(("wrap-before-device", text % (user_place(frame), what, local_rank)))
    return findings


def _first_of_all_ranks(key):
    """Tell whether this rank is the first with that finding, so that a job says it once."""
    c10d = sys.modules.get(C10D)
    if c10d is None or c10d.GroupMember.WORLD is None:
        return True
    try:
        return c10d._get_default_store().add("saferun/said/" + key, 1) == 1
    except Exception:  # a store that cannot count: better twice than never
        return True


def _real(c10d, group):
    known = c10d._world.pg_map.get(group)  # a group of the script's own making is not there
    parts = [part.rpartition(":")[2] for part in str(known[0] if known else "").split(",")]
    return all(part in init.BACKENDS for part in parts)


def _too_early(environ):
    """Tell whether something made now comes before the group of a job with several ranks."""
    c10d = sys.modules.get(C10D)
    if not environ.get("WORLD_SIZE", "").isdigit() or int(environ["WORLD_SIZE"]) < 2:
        return False
    worker = sys.modules.get("torch.utils.data._utils.worker")
    in_worker = worker is not None and worker._worker_info is not None
    return not in_worker and (c10d is None or c10d.GroupMember.WORLD is None)


def _is_rank(environ):
    """Tell whether this process is a rank itself: its helpers carry RANK too."""
    import multiprocessing

    mark = environ.get(contract.RANK_MARK)
    return (
        _too_early(environ)
        and bool(environ.get("RANK") and environ.get("MASTER_ADDR"))
        and mark in (None, str(os.getpid()))
        and multiprocessing.parent_process() is None
    )


def user_place(frame):
    """Return "file:line" of the innermost frame of the user's own: outside torch, ours, libraries.

    Where there is none, the innermost outside torch and ours.
    """
    nearest = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_torch(name) and not _is_ours(name):
            place = "%s:%d" % (name, frame.f_lineno)
            if not _is_library(name):
                return place
            nearest = nearest or place
        frame = frame.f_back
    return nearest or "unknown place"


def called_by_library(frame):
    """Tell whether the innermost frame outside torch and ours belongs to an installed library."""
    return _is_library(_file(frame))


def _file(frame):
    """Return the file of the innermost frame outside torch and ours, "" for none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_torch(name) and not _is_ours(name):
            return name
        frame = frame.f_back
    return ""


def _is_torch(name):
    return name.startswith(os.path.dirname(sys.modules["torch"].__file__) + os.sep)


def _is_ours(name):
    return name.startswith(os.path.dirname(os.path.dirname(__file__)) + os.sep)


def _is_library(name):
    parts = name.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts or name.startswith("<frozen"):
        return True
    return name.startswith(os.path.dirname(os.__file__) + os.sep)
