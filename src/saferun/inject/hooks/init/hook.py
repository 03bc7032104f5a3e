"""Let ranks check in, compare facts and start together, around `init_process_group`.

Target: torch.distributed.distributed_c10d.init_process_group, torch >= 2.4, under every name.
Reason: the original waits without a message if a rank is missing. Ranks with different torch, NCCL
or GPUs, or two ranks on one device, fail much later and far from the cause. The barrier goes
through the store because a first NCCL barrier can hang or take a minute
(https://github.com/pytorch/pytorch/issues/124714, https://github.com/NVIDIA/nccl/issues/1646).
Delete when torch names missing ranks and mismatches itself.

Settings (hooks.init): set_device, barrier (store | collective | off), agree (error | warn | off),
timeout_s. If barrier and agree are both off, ranks do not meet at all.

Ranks meet *before* the original if torchrun's agent holds the store. They do not wait for a rank in
which the supervisor has seen no hooks: that one waits for them, in torch's own call. Otherwise
(`file://`, a store that the script made, mp.spawn, a store in rank 0) they meet afterwards in the
group's store. Some of those ranks may have no saferun, so that meeting is short, and an absence is
only a warning.
Whether they train from the same step shows later (first_steps.py).
"""

from __future__ import annotations

import datetime
import inspect
import os
import sys
import time

from ....base import durations
from ....base.rank_numbers import ranks_text
from ... import collective_times, contract, first_steps, hidden_frames, meeting, rank_differences
from .. import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

    from saferun.settings import InitHook

    from ...context import Context


AFTERWARDS_S = 60.0  # limit of a meeting in which some ranks may have no saferun
CONNECT_S = 60.0  # the agent's store is up before any rank starts
BACKENDS = {"nccl", "gloo", "ucc", "xccl", "hccl", "undefined"}  # no fake, threaded or mpi ones


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Wrap `init_process_group`.

    Args:
        name: "torch.distributed.distributed_c10d".
        module: that module.
        context: the process's context.
    """
    settings = context.hooks.init
    c10d: Any = module
    if not hasattr(c10d, "init_process_group"):
        return
    signature = inspect.signature(c10d.init_process_group)
    done: dict[int, int] = {}  # pid -> successful inits of this process; a forked child starts at 0

    def step(act: Callable[[], InitCall]) -> InitCall | None:
        try:
            return act()
        except RefusalError as refusal:
            raise refusal.error from None
        except Exception as error:
            context.failed("init", error)
            return None

    @hidden_frames.replace(c10d, "init_process_group")
    def init_process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if c10d.GroupMember.WORLD is not None:
            return original(*args, **kwargs)  # torch raises its own error
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # torch reports the error in the call
            return original(*args, **kwargs)
        earlier = done.get(os.getpid(), 0)
        call = step(lambda: InitCall(c10d, arguments, settings, context, earlier).before())
        result = original(*args, **kwargs)
        done[os.getpid()] = earlier + 1
        if call is not None:
            step(call.after)
        return result


class RefusalError(Exception):
    """The job must not continue; `error` is the exception that the script sees."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class InitCall:
    """One call of init_process_group: its arguments, and the meetings around it."""

    def __init__(
        self,
        c10d: ModuleType,
        arguments: Mapping[str, Any],
        settings: InitHook,
        context: Context,
        earlier: int,
    ) -> None:
        """Store a call.

        Args:
            c10d: torch.distributed.distributed_c10d.
            arguments: the call's arguments, by name.
            settings: the settings `hooks.init`.
            context: the process's context.
            earlier: number of successful inits of this process before this one.
        """
        self._c10d = c10d
        self._settings = settings
        self._context = context
        self._earlier = earlier
        self._backend = str(arguments.get("backend") or "undefined").lower()
        self._device_id = arguments.get("device_id")
        given = getattr(arguments.get("timeout"), "total_seconds", None)  # the script's own wins
        self._timeout_s = float(settings.timeout_s) if given is None else given()
        self._world = environment.world_of(arguments, os.environ)
        off = settings.barrier == settings.agree == "off" or environment.inits_lazily(os.environ)
        self._wanted = is_real(self._backend) and not off
        self._agent: Any = None  # our own connection to the agent's store, only during the call
        self._compared = False
        self._check_in_s: float | None = None
        self._device: int | None = None

    def before(self) -> InitCall:
        """Set the device; check in and compare if all ranks share the agent's store.

        Returns itself, as `after` does.
        """
        if self._settings.set_device and self._device_id is None:
            cuda = sys.modules["torch"].cuda
            self._device = device_to_set(self._backend, os.environ.get("LOCAL_RANK"), cuda)
            if self._device is not None:
                cuda.set_device(self._device)
        if self._world and (version := _nccl_version(self._backend)):
            rank, size = self._world
            self._context.receipt(
                "init", contract.OBSERVED, rank=rank, world_size=size, nccl=version
            )
        if not (self._wanted and self._world and self._earlier == 0):
            return self
        rank, size = self._world
        if size > 1 and environment.shares_agent_store(os.environ):
            self._context.activate()  # the supervisor sees that this one has hooks
            self._agent = self._agent_store()
            self._meet_in_agent("check-in", "reach", rank, size)
        return self

    def after(self) -> InitCall:
        """Compare now if that was not possible before, wait for all ranks, write the receipt."""
        rank, size = self._c10d.get_rank(), self._c10d.get_world_size()
        barrier = self._settings.barrier
        if self._wanted and size > 1:
            if self._agent is not None:
                if barrier == "store":
                    self._meet_in_agent("barrier", "get through", rank, size)
            elif self._settings.agree != "off" or barrier == "store":
                self._meet_afterwards(rank, size)
            if barrier == "collective":
                _collective_barrier(self._c10d)
            if self._settings.agree != "off" and not self._earlier:
                first_steps.watch(self._c10d, rank, self._settings.agree, self._context)
        self._agent = None
        if size > 1 and self._context.is_watched and not self._earlier:
            collective_times.arm(self._c10d, self._context)
        facts = {} if self._device is None else {"device": self._device}
        self._context.receipt(
            "init",
            contract.APPLIED,
            rank=rank,
            world_size=size,
            check_in_s=self._check_in_s,
            backend=self._backend,
            **facts,
        )
        return self

    def _meet_in_agent(self, what: str, verb: str, rank: int, size: int) -> None:
        """Meet in the agent's store; absence is an error that says that ranks did not `verb`."""
        store = _torch_distributed().PrefixStore(agent_prefix(what, os.environ), self._agent)
        comparison, missing = self._meet(store, rank, size, self._timeout_s)
        if missing:
            text = _absence(missing, size, verb, self._timeout_s)
            if not environment.is_one_node(os.environ):
                text += " (every node has to run under saferun)"
            if rank_differences.is_reporter(rank, _local_rank(rank), missing):
                self._context.say(text)
            kind = getattr(_torch_distributed(), "DistStoreError", RuntimeError)
            self._refuse(kind(text), rank=rank, missing=missing)
        self._act_on_differences(comparison, rank)

    def _meet_afterwards(self, rank: int, size: int) -> None:
        """Meet in the group's own store; an absence is a warning."""
        prefix = f"saferun/init/{self._earlier}"
        own = meeting.own_connection(self._c10d._get_default_store())
        store = _torch_distributed().PrefixStore(prefix, own)
        timeout_s = min(self._timeout_s, AFTERWARDS_S)
        comparison, missing = self._meet(store, rank, size, timeout_s)
        if missing:
            if rank_differences.is_reporter(rank, _local_rank(rank), missing):
                text = _absence(missing, size, "meet after", timeout_s)
                self._context.say(text + " (is saferun there?); the job goes on")
        else:
            self._act_on_differences(comparison, rank)
            meeting.leave(store, size, stays=rank == 0)

    def _meet(
        self, store: Any, rank: int, size: int, timeout_s: float
    ) -> tuple[rank_differences.Comparison, list[int]]:
        """Meet and return the comparison and the missing ranks.

        The facts are compared at the first meeting only; later ones are plain barriers.
        """
        facts: rank_differences.RankFacts = {} if self._compared else self._facts(size)
        self._compared = True
        start = time.monotonic()
        compare, never_come = rank_differences.compare, self._context.ranks_without_hooks
        result = meeting.meet(store, rank, size, facts, compare, timeout_s, never_come)
        if self._check_in_s is None:
            self._check_in_s = round(time.monotonic() - start, 4)
        return result

    def _act_on_differences(self, comparison: rank_differences.Comparison, rank: int) -> None:
        """Act on differences as `agree` says; different arguments cause only a warning."""
        agree = self._settings.agree
        differences = comparison["differences"]
        if agree == "off":
            return
        if comparison["arguments"] and rank == 0:
            self._context.say(comparison["arguments"])
        if not differences:
            return
        text = "ranks differ: " + "; ".join(differences)
        if agree == "warn":
            if rank == 0:
                self._context.say(text)
            return
        text += ". Give all ranks the same, or set hooks.init.agree to warn"
        self._refuse(RuntimeError(text), rank=rank, differences=differences)

    def _refuse(self, error: Exception, **facts: object) -> None:
        self._context.receipt("init", contract.APPLIED, **facts)
        self._context.activate()
        raise RefusalError(error)

    def _agent_store(self) -> Any:
        store = _torch_distributed().TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,  # the original's own count of clients stays unchanged
            timeout=datetime.timedelta(seconds=CONNECT_S),  # a loaded machine, not a missing rank
        )
        store.set_timeout(datetime.timedelta(seconds=min(self._timeout_s, CONNECT_S)))
        return store

    def _facts(self, size: int) -> rank_differences.RankFacts:
        facts: rank_differences.RankFacts = {
            "world_size": size,
            "mitigations": ", ".join(sorted(self._context.mitigations)) or "none",
            "barrier": self._settings.barrier,
            "start": self._context.start or "the script's own way",
            "host": os.uname().nodename,
            "argv": rank_differences.comparable_arguments(sys.argv),
            "local": os.environ.get("LOCAL_RANK", ""),
        }
        if self._backend in BACKENDS - {"undefined"}:  # one that its argument names alone
            facts["backend"] = self._backend
        _add_versions(facts, sys.modules["torch"], self._backend)
        return facts


# What the call says.


def is_real(backend: str) -> bool:
    """Return whether a backend, as torch names it ("cpu:gloo,cuda:nccl"), joins real processes."""
    return all(part.rpartition(":")[2] in BACKENDS for part in backend.split(","))


def agent_prefix(what: str, environ: Mapping[str, str]) -> str:
    """Return the prefix of a meeting's keys, from run and restart: the store outlives them.

    The attempt is not part of it: each attempt has its own agent and store, and nodes that meet may
    be at different attempts (a node whose rendezvous timed out alone is one further).

    Args:
        what: the name of the meeting.
        environ: the variables of torchrun.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world = environ.get("WORLD_SIZE", "")  # changes when nodes come and go
    return f"saferun/{run}/{restart}/{world}/{what}"


def device_to_set(backend: str, local_rank: str | None, cuda: Any) -> int | None:
    """Return the index of the device to set, or None.

    Args:
        backend: the argument of `init_process_group`, lower case; "undefined" for none.
        local_rank: the text of LOCAL_RANK, or None.
        cuda: torch.cuda, used only if the backend may be NCCL; no context is made.
    """
    if "nccl" not in backend and backend != "undefined":
        return None
    if local_rank is None or not local_rank.isdigit():
        return None
    if cuda.is_initialized() or not cuda.is_available():
        return None
    index = int(local_rank)
    return index if cuda.device_count() > index else None


def _local_rank(rank: int) -> int:
    """Return a rank's place among the ranks of its node; without torchrun there is one node."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdigit() and "GROUP_RANK" in os.environ else rank


def _absence(missing: list[int], size: int, verb: str, timeout_s: float) -> str:
    who = ranks_text(missing)
    return (
        f"{who} of {size} did not {verb} init_process_group within {durations.seconds(timeout_s)}"
    )


# torch and its devices.


def _torch_distributed() -> ModuleType:
    # torch.distributed has the names of all stores; distributed_c10d does not.
    return sys.modules["torch.distributed"]


def _add_versions(facts: rank_differences.RankFacts, torch: ModuleType, backend: str) -> None:
    """Add the versions and the GPU's name; CUDA is used only if a context already exists."""
    facts["torch"] = str(torch.__version__)
    facts["cuda"] = torch.version.cuda or "none"
    if _may_be_nccl(backend) and torch.cuda.is_initialized():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["nccl"] = _nccl_version(backend)


def _may_be_nccl(backend: str) -> bool:
    return "nccl" in backend or backend == "undefined"


def _nccl_version(backend: str) -> str:
    """Return the version of the loaded NCCL; "" if none is used. This makes no context."""
    cuda = sys.modules["torch"].cuda
    if not (_may_be_nccl(backend) and (cuda.is_initialized() or cuda.is_available())):
        return ""
    try:
        return ".".join(str(part) for part in cuda.nccl.version())
    except (AttributeError, RuntimeError):  # a torch built without NCCL
        return ""


def _collective_barrier(c10d: ModuleType) -> None:
    torch = sys.modules["torch"]
    if "nccl" in str(c10d.get_backend()) and torch.cuda.is_initialized():
        c10d.barrier(device_ids=[torch.cuda.current_device()])
    else:
        c10d.barrier()
