"""Ranks check in, agree and set off together: around `init_process_group`.

Target: torch.distributed.distributed_c10d.init_process_group, torch >= 2.4, under every name.
Reason: the original blocks in silence when a rank is missing, and ranks with different torch, NCCL
or GPUs fail much later and far from the cause; two ranks on one device do too. Why the barrier
goes through the store: a first NCCL barrier can hang or take a minute
(https://github.com/pytorch/pytorch/issues/124714, https://github.com/NVIDIA/nccl/issues/1646).
Delete it when torch names missing ranks and mismatches itself.

Settings (hooks.init): set_device, barrier (store | collective | off), agree (error | warn | off),
timeout_s. With barrier and agree both off ranks do not meet at all.

Ranks meet *before* the original where torchrun's agent holds the store. Elsewhere (`file://`, a
store of the script's own, mp.spawn, a store in rank 0) they meet afterwards in the group's store;
some of those ranks may have no saferun, so that meeting is short and only ever warns about absence.
"""

from __future__ import annotations

import os
import sys
import time

from _saferun_inject import agreement
from _saferun_inject import store as meetings

AFTERWARDS_S = 60.0  # bound of a meeting in which not every rank need have saferun
CONNECT_S = 60.0  # the agent's store is up before any rank starts
BACKENDS = {"nccl", "gloo", "ucc", "xccl", "hccl", "undefined"}  # real ones: no fake, threaded, mpi
RANK_WORDS = {
    "local_rank",
    "rank",
    "node_rank",
    "global_rank",
    "machine_rank",
    "local_process_index",
    "process_index",
    "process_id",
}
SECRET_WORDS = ("key", "token", "secret", "password")


def apply(name, module, context):
    """Wrap `init_process_group` of the freshly executed distributed_c10d."""
    settings = context.hooks.get("init")
    if settings and hasattr(module, "init_process_group"):
        module.init_process_group = _wrap(module, module.init_process_group, settings, context)


def _wrap(c10d, original, settings, context):
    import functools
    import inspect

    signature = inspect.signature(original)
    done = {}  # this process's successful inits, by pid: a forked child starts anew

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        if c10d.GroupMember.WORLD is not None:
            return original(*args, **kwargs)  # torch's own complaint
        visit = None
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:  # what is wrong with the call itself, torch says better
            return original(*args, **kwargs)
        try:
            visit = Visit(c10d, bound, settings, context, done.get(os.getpid(), 0))
            visit.before()
        except RefusalError as refusal:
            raise _error(c10d, refusal) from None
        except Exception as error:
            visit = None
            context.failed("init", error)
        result = original(*args, **kwargs)
        done[os.getpid()] = done.get(os.getpid(), 0) + 1
        try:
            if visit is not None:
                visit.after()
        except RefusalError as refusal:
            raise _error(c10d, refusal) from None
        except Exception as error:
            context.failed("init", error)
        return result

    return init_process_group


class RefusalError(Exception):
    """The job must not go on: ranks are missing (`absent`), or they disagree."""

    def __init__(self, text, absent):
        super().__init__(text)
        self.absent = absent


def _error(c10d, refusal):
    """Return what the script sees: torch's own type where ranks are missing."""
    kind = getattr(sys.modules.get("torch.distributed"), "DistStoreError", RuntimeError)
    return (kind if refusal.absent else RuntimeError)(str(refusal))


class Visit:
    """One call of init_process_group: what it asked for, and the meetings around it."""

    def __init__(self, c10d, arguments, settings, context, earlier):
        self.c10d = c10d
        self.settings = settings
        self.context = context
        self.earlier = earlier  # successful inits before this one
        self.backend = str(arguments.get("backend") or "undefined").lower()
        self.device_id = arguments.get("device_id")
        self.timeout_s = bound_s(settings.get("timeout_s", 600), arguments.get("timeout"))
        self.world = world_of(arguments, os.environ)
        self.wanted = wants_meeting(self.backend, settings) and not waits_for_nobody(os.environ)
        self.agent = None  # our own connection to the agent's store, for as long as the call lasts
        self.judged = False
        self.check_in_s = None
        self.device = None

    def before(self):
        """Set the device; check in and agree where the agent's store is there for all ranks."""
        if self.settings.get("set_device", True):
            self.device = _set_device(self.backend, self.device_id)
        if not (self.wanted and self.world and self.earlier == 0):
            return
        rank, size = self.world
        if size > 1 and shares_agent_store(os.environ):
            self.agent = self._agent_store()
            self._meet(self._room(self.agent, "check-in"), rank, size, self.timeout_s, "reach")
            self.judged = True

    def after(self):
        """Agree now if there was no way before, wait for all ranks, and leave the receipt."""
        rank, size = self.c10d.get_rank(), self.c10d.get_world_size()
        if self.wanted and size > 1:
            if self.agent is not None:
                self._barrier_with_agent(rank, size)
            elif self.settings.get("agree", "error") != "off" or self._barrier() == "store":
                self._meet_afterwards(rank, size)
            if self._barrier() == "collective":
                _collective_barrier(self.c10d)
        self.agent = None
        facts = {"device": self.device} if self.device is not None else {}
        self.context.receipt(
            "init",
            "applied",
            rank=rank,
            world_size=size,
            check_in_s=self.check_in_s,
            backend=self.backend,
            **facts,
        )

    def _barrier(self):
        return self.settings.get("barrier", "store")

    def _barrier_with_agent(self, rank, size):
        if self._barrier() == "store":
            room = self._room(self.agent, "barrier")
            self._meet(room, rank, size, self.timeout_s, "get through")

    def _meet_afterwards(self, rank, size):
        room = _stores().PrefixStore(
            "saferun/init/%d" % self.earlier, own_connection(self.c10d._get_default_store())
        )
        verdict = self._meet(room, rank, size, min(self.timeout_s, AFTERWARDS_S), None)
        self.judged = True
        if not verdict["missing"]:
            meetings.leave(room, rank, size)

    def _meet(self, room, rank, size, timeout_s, verb):
        """Meet in `room` and act on the verdict; absence is fatal where there is a `verb` for it.

        The facts are compared at the first meeting only; later ones are plain barriers.
        """
        facts = {} if self.judged else self._facts(rank, size)
        start = time.monotonic()
        verdict = meetings.meet(room, rank, size, facts, agreement.judge, timeout_s)
        if self.check_in_s is None:
            self.check_in_s = round(time.monotonic() - start, 4)
        if verdict["missing"]:
            self._absent(verdict, rank, size, timeout_s, verb)
        else:
            self._disagree(verdict, rank)
        return verdict

    def _absent(self, verdict, rank, size, timeout_s, verb):
        who = (agreement.ranks_text(verdict["missing"]), size, verb or "meet after", timeout_s)
        text = "%s of %d did not %s init_process_group within %g s" % who
        if verb and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            text += " (every node has to run under saferun)"
        if rank in verdict.get("speakers", ()) or (not verdict.get("speakers") and rank == 0):
            self.context.say(text if verb else text + " (is saferun there?); the job goes on")
        if verb:
            self.context.receipt("init", "applied", rank=rank, missing=verdict["missing"])
            self.context.activate()
            raise RefusalError(text, absent=True)

    def _disagree(self, verdict, rank):
        """Act on differences: `agree` decides what becomes of them; arguments only ever warn."""
        agree = self.settings.get("agree", "error")
        differences = verdict.get("differences") or []
        if agree == "off":
            return
        if verdict.get("arguments") and rank == 0:
            self.context.say(verdict["arguments"])
        if differences and agree == "warn" and rank == 0:
            self.context.say("ranks differ: " + "; ".join(differences))
        if differences and agree == "error":
            self.context.receipt("init", "applied", rank=rank, differences=differences)
            self.context.activate()
            raise RefusalError(
                "ranks differ: %s. Give all ranks the same, or set hooks.init.agree to warn"
                % "; ".join(differences),
                absent=False,
            )

    def _agent_store(self):
        import datetime

        return _stores().TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,  # the original's own count of clients stays as it was
            timeout=datetime.timedelta(seconds=min(self.timeout_s, CONNECT_S)),
        )

    def _room(self, store, what):
        """Return `store` under a prefix of run and restart: the agent's store lives on.

        Not of the attempt: each has an agent, hence a store, of its own, and nodes that meet need
        not be at the same one (a node whose rendezvous timed out alone is one further).
        """
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        world = os.environ.get("WORLD_SIZE", "")  # changes where nodes come and go
        prefix = "saferun/%s/%s/%s/%s" % (run, restart, world, what)
        return _stores().PrefixStore(prefix, store)

    def _facts(self, rank, size):
        facts = {
            "world_size": size,
            "mitigations": ", ".join(sorted(self.context.mitigations)) or "none",
            "barrier": self._barrier(),
            "argv": arguments_of(sys.argv),
            "local": os.environ.get("LOCAL_RANK", ""),
            "node": os.environ.get("GROUP_RANK", "0"),
        }
        facts.update(_versions(sys.modules["torch"], self.backend))
        return facts


# What the call and the environment say: pure.


def bound_s(timeout_s, given):
    """Return our bound in seconds: the script's own where it gives one, else the profile's."""
    seconds = getattr(given, "total_seconds", None)
    return float(timeout_s) if seconds is None else seconds()


def wants_meeting(backend, settings):
    """Tell whether ranks should meet: a real backend, and somebody asked for it."""
    parts = [part.rpartition(":")[2] for part in backend.split(",")]
    off = settings.get("barrier", "store") == "off" and settings.get("agree", "error") == "off"
    return not off and all(part in BACKENDS for part in parts)


def waits_for_nobody(environ):
    """Tell whether the script wants an init that returns before other ranks are there."""
    return environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")


def world_of(arguments, environ):
    """Return the environment's (rank, size), None where the group is not one of its world.

    A script may number the ranks anew (`rank=`): before the group is made all of them go by the
    environment's numbers, or those whose numbers coincide would wait for the others.
    """
    if arguments.get("store") is not None or arguments.get("init_method") not in (None, "env://"):
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if arguments.get("world_size", -1) not in (-1, size) or not 0 <= rank < size:
        return None
    return rank, size


def shares_agent_store(environ):
    """Tell whether all ranks of this attempt find the agent's store under the same prefix.

    The restart count is each agent's own: after a failure on one node the nodes' counts differ
    (elastic/agent/server/api.py), so with restarts only a single node can meet there.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return False
    one_node = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return one_node or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"


def arguments_of(argv):
    """Return a script's arguments as the comparison sees them.

    Without those that tell a rank who it is, the script by its file name alone (nodes may keep it
    in different places), and with secrets masked.
    """
    words = [os.path.basename(argv[0])] if argv else []
    skip = secret = False
    for word in argv[1:]:
        if (skip or secret) and not word.startswith("-"):
            words.extend(["***"] if secret else [])
            skip = secret = False
            continue
        name, equals, _ = word.partition("=")
        plain = name.lstrip("-").replace("-", "_").lower()
        is_option = word.startswith("-")
        rank_word = is_option and plain in RANK_WORDS
        secret_word = is_option and any(part in plain for part in SECRET_WORDS)
        skip, secret = rank_word and not equals, secret_word and not equals
        if not rank_word:
            words.append(name + "=***" if secret_word and equals else word)
    return words


def device_to_set(backend, local_rank, cuda):
    """Return the index of the device to set, or None.

    Args:
        backend: as `init_process_group` was given it, lower case; "undefined" for none.
        local_rank: the text of LOCAL_RANK, or None.
        cuda: torch.cuda; only asked when the backend may be NCCL, and never for a context.
    """
    if "nccl" not in backend and backend != "undefined":
        return None
    if local_rank is None or not local_rank.isdigit():
        return None
    if cuda.is_initialized() or not cuda.is_available():
        return None
    index = int(local_rank)
    return index if cuda.device_count() > index else None


# The edge: torch and its devices.


def _set_device(backend, device_id):
    torch = sys.modules["torch"]
    if device_id is not None:
        return None
    index = device_to_set(backend, os.environ.get("LOCAL_RANK"), torch.cuda)
    if index is not None:
        torch.cuda.set_device(index)
    return index


def _versions(torch, backend):
    """Return the versions and the GPU's name; asks CUDA only where a context is there already."""
    facts = {"torch": str(torch.__version__), "cuda": torch.version.cuda or "none"}
    if ("nccl" in backend or backend == "undefined") and torch.cuda.is_initialized():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return facts


def _stores():
    """Return the module with the stores' names: distributed_c10d has not all of them."""
    return sys.modules["torch.distributed"]


def own_connection(store):
    """Return a connection of our own: a blocking wait on the group's would stop its threads."""
    try:
        return store.clone()
    except Exception:  # torch < 2.8, a FileStore or a store of the script's own
        return store


def _collective_barrier(c10d):
    torch = sys.modules["torch"]
    if "nccl" in str(c10d.get_backend()) and torch.cuda.is_initialized():
        c10d.barrier(device_ids=[torch.cuda.current_device()])
    else:
        c10d.barrier()
