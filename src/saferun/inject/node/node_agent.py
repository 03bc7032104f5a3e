"""The agent's part in a run on several nodes: meet before each attempt, watch, wait for all.

Target: torch.distributed.elastic, torch >= 2.4: `SimpleElasticAgent._rendezvous`, `.run`,
`._shutdown` and `._exit_barrier` (agent/server/api.py, local_elastic_agent.py); the rendezvous
itself is in torch_rendezvous.py.
Reason: each node has a saferun of its own. They must begin an attempt under one number, with the
same mitigations, and know where the last one failed (node_agreement.py); and torchrun's agents
notice no silent node (node_watch.py), wait for 300 s in the exit barrier, deaf to SIGTERM, and exit
with status 0 then (https://github.com/pytorch/pytorch/issues/135712 is related).
Delete it when torchrun's agents exchange data of a launcher's own and watch each other.

It is active only if SAFERUN_NODES is set, which saferun does for attempts on several nodes.

    SAFERUN_NODES   {"facts": NodeFacts, "directory": where the outcome goes or null,
                     "rejoin_s": seconds, "since": when these begin, or null for now,
                     "expects": whether other nodes have just left to come back}
    outcome         DIRECTORY/nodes-aN.json: {"agreement": Agreement, "node": N, "at": UNIX
                    SECONDS}, {"alone": Alone} where the others did not come back, or {"again":
                    TEXT} where ranks have run and the nodes have to meet anew
    loss            DIRECTORY/nodes-lost-aN.json: {"why": TEXT, "nodes": [N, …]}
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from ...base import files
from .. import hidden_frames, meeting
from ..context import say
from . import node_agreement, node_joining, node_return, node_watch, torch_rendezvous
from .node_agreement import Agreement, Alone, LostNodes, MeetingOutcome, NodeFacts
from .node_joining import SIGNALLED, fault, harmlessly, is_of_torch
from .torch_rendezvous import TorchRendezvous

VARIABLE = "SAFERUN_NODES"
AGENT_API = "torch.distributed.elastic.agent.server.api"
REGISTRY = "torch.distributed.elastic.rendezvous.registry"
MEET_S = 15.0  # all nodes have just left the same rendezvous
# Approximate time between two attempts to join; opening a store takes about as long.
AGAIN_S = 1.0
DONE_LOOK_S = 0.01  # between two checks whether all nodes are done, if they end together
LEAST_CONNECT_S = 20.0  # for a connection under load
LAST_CONNECT_S = 5.0  # after a failed try: the waiting nodes give up at about the same time
BACKENDS = ("c10d", "static")  # those with a store of torch's own


def start(come_first: Callable[[], None]) -> None:
    """Read SAFERUN_NODES, which the ranks do not get, and hook present and future imports.

    Args:
        come_first: puts our directory first in PYTHONPATH, before ranks are started.
    """
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return
    party = NodeParticipant(json.loads(text))

    def hook_agent(module: ModuleType) -> None:
        come_first()
        party.hook_agent(module.SimpleElasticAgent)

    hooks: dict[str, Callable[[ModuleType], None]] = {
        REGISTRY: party.hook_registry,
        AGENT_API: hook_agent,
    }
    for name, hook in hooks.items():
        if name in sys.modules:
            hook(sys.modules[name])
    if REGISTRY not in sys.modules:
        from .. import finder

        finder.watch(hooks, lambda name, module: hooks[name](module))


def outcome_name(attempt: int) -> str:
    """Return the name of the file in which the agent writes the agreement."""
    return f"nodes-a{attempt}.json"


def loss_name(attempt: int) -> str:
    """Return the name of the file in which the agent reports that it lost other nodes."""
    return f"nodes-lost-a{attempt}.json"


class NodeParticipant:
    """The agent of this node, as a participant of the meeting.

    Args:
        given: the value of SAFERUN_NODES.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._facts: NodeFacts = given["facts"]
        self._attempt: int = self._facts["attempt"]
        self._directory: str | None = given["directory"]
        self._rejoin_s: float = given["rejoin_s"]
        self._since: float = given.get("since") or time.monotonic()
        self._back = node_return.Return(self._facts)
        self._joining = node_joining.Joining(self._facts, self._refuse, self._back)
        self._torch = TorchRendezvous(
            self._facts, self._rejoin_s, given.get("expects", False), self._back, self._joining
        )
        self._was_early = False  # it met an attempt that was about to end in the rendezvous
        self._watch: node_watch.NodeWatch | None = None
        self._is_ending = False
        self._began = False  # ranks were started by this agent
        self._is_done = False  # all of them have succeeded

    def hook_registry(self, registry: ModuleType) -> None:
        """Have torch's rendezvous opened by us, within retry.rejoin_s."""
        self._torch.hook(registry, lambda: self._handler(self._since + self._rejoin_s))

    def hook_agent(self, agent: Any) -> None:
        """Wrap an agent's methods for its beginning and its end."""
        hidden_frames.replace(agent, "_rendezvous")(self._rendezvous)
        hidden_frames.replace(agent, "_exit_barrier")(self._exit_barrier)
        hidden_frames.replace(agent, "run")(self._run)

    def _handler(self, limit: float) -> Any:
        """Return a new handler of the rendezvous, once its store can be reached."""
        least_s = LEAST_CONNECT_S
        while True:
            try:
                return self._torch.opened(limit, least_s)
            except Exception as error:
                if time.monotonic() > limit or not self._may_come_back(error):
                    self._give_up(error)
                least_s = LAST_CONNECT_S
                time.sleep(AGAIN_S * (0.5 + _chance()))

    # --- the beginning ---

    def _rendezvous(self, original: Callable[..., Any], agent: Any, *rest: Any) -> None:
        """Join, meet, and continue only if all nodes begin the same attempt."""
        spec = agent._worker_group.spec
        backend = harmlessly("no other node is met", spec.rdzv_handler.get_backend)
        if backend not in BACKENDS or (self._began and backend == "static"):
            original(agent, *rest)  # static: with --max-restarts a node restarts its ranks alone
            return
        if self._watch is not None:
            self._watch.stop()
        torch_rendezvous.forget_address(spec.rdzv_handler)
        self._join(original, agent, *rest)
        self._joining.end()
        if self._began and spec.max_restarts == 0:
            # Nodes came or went. The supervisor determines the checkpoint from which all resume.
            self._facts = {**self._facts, "attempt": self._attempt + 1, "report": None}
            say(f"nodes have joined or left: attempt {self._attempt + 1} starts on all of them")
        try:
            self._go_on(agent)
        except Exception as error:
            if is_of_torch(error):  # the store is gone, and with it the rendezvous
                raise
            say(fault("the nodes could not compare their settings", error))

    def _go_on(self, agent: Any) -> None:
        """Meet the other nodes; return to let the ranks start, or end the agent."""
        group = agent._worker_group
        handler, store = group.spec.rdzv_handler, torch_rendezvous.ours(agent._store)
        rank, size = group.group_rank, group.group_world_size
        agreement = self._meet(store, rank, size, torch_rendezvous.hosts(handler))
        outcome: MeetingOutcome = {"agreement": agreement, "node": rank, "began": self._began}
        self._write(outcome_name(self._attempt), outcome)
        if agreement["action"] != node_agreement.BEGIN:
            try:
                meeting.leave(store, size, stays=True)
            except RuntimeError:  # the store ends with its host, which has left
                pass
            handler.shutdown = lambda: True  # the next attempt may use the same store
            raise SystemExit(node_agreement.REGROUP_STATUS)
        if agreement["warning"]:
            say(agreement["warning"])
        self._say_root(agreement)
        self._begin(store, rank, agreement, agent)

    def _join(self, original: Callable[..., Any], agent: Any, *rest: Any) -> None:
        """Join the rendezvous; leave one that is about to end, and join the next."""
        limit: float | None = None  # starts at the first failure: a spare node waits for hours
        if self._attempt > 1 and not self._began:
            time.sleep(_chance() * self._torch.spread_s)
        while True:
            try:
                original(agent, *rest)
                if not harmlessly(
                    "an earlier attempt may be met", lambda: self._is_early(agent), store=True
                ):
                    return
                error: Exception = RuntimeError("the store of an earlier attempt lives on")
            except Exception as caught:
                error = caught
            if self._began and type(error).__name__ != SIGNALLED:
                self._meet_anew(error)
            limit = limit or time.monotonic() + self._rejoin_s
            if time.monotonic() > limit or not self._may_come_back(error, waited=True):
                self._give_up(error)
            time.sleep(AGAIN_S * (0.5 + _chance()))
            leave = functools.partial(torch_rendezvous.leave, agent._worker_group.spec.rdzv_handler)
            harmlessly("a node that is left seems to live", leave)
            agent._worker_group.spec.rdzv_handler = self._handler(limit)

    def _give_up(self, error: Exception) -> NoReturn:
        """End the agent; from the second attempt on the supervisor explains why."""
        is_signal = type(error).__name__ == SIGNALLED
        if is_signal or self._attempt == 1 or self._directory is None:
            raise error
        alone: Alone = {"came": [], "unreached": self._torch.endpoint, "root": None}
        if isinstance(error, node_return.Over):
            alone = error.alone
        elif type(error).__name__ == "RendezvousTimeoutError":
            alone = harmlessly("the others are not told", self._back.over) or alone
        self._write(outcome_name(self._attempt), {"alone": alone})
        if not alone["unreached"]:
            time.sleep(node_joining.LEAVE_S)  # the store may end with this agent
        raise SystemExit(node_agreement.REGROUP_STATUS)

    def _meet_anew(self, error: Exception) -> NoReturn:
        """Leave after ranks have run, because nodes came or went and did not meet again."""
        why = f"nodes have joined or left ({type(error).__name__})"
        outcome: MeetingOutcome = {"again": why, "start": self._facts.get("start")}
        self._write(outcome_name(self._attempt), outcome)
        raise SystemExit(node_agreement.REGROUP_STATUS)

    def _is_early(self, agent: Any) -> bool:
        store = torch_rendezvous.ours(agent._store)
        if not store.check(["result"]):
            return False
        self._was_early = True
        return node_watch.await_earlier(store, self._attempt, self._rejoin_s)

    def _refuse(self, agreement: Agreement) -> None:
        self._joining.end()
        self._write(outcome_name(self._attempt), {"agreement": agreement, "node": 0})
        raise SystemExit(node_agreement.REGROUP_STATUS)

    def _may_come_back(self, error: Exception, *, waited: bool = False) -> bool:
        """Return whether the failed rendezvous was that of the previous attempt.

        Args:
            error: the failure.
            waited: whether this node had reached the rendezvous and waited there.
        """
        name = type(error).__name__
        if name in ("RendezvousTimeoutError", "Over", SIGNALLED) or not self._torch.is_hooked:
            return False
        lost = waited and name == "RendezvousConnectionError"
        return lost or name == "RendezvousClosedError" or self._attempt > 1 or self._was_early

    def _meet(self, store: Any, rank: int, size: int, names: dict[int, str]) -> Agreement:
        if rank == 0:
            self._facts = {**self._facts, "beats": node_watch.prepare(store, size)}
        holds = harmlessly("the host of the rendezvous is not known", self._torch.holds)
        self._facts = {**self._facts, "holds": bool(holds)}
        agreement, missing = meeting.meet(
            store, rank, size, self._facts, node_agreement.agree, MEET_S
        )
        if missing:
            known = [f"node {node} ({names.get(node, 'host not known')})" for node in missing]
            who = ", ".join(known)
            agreement["why"] = f"without saferun, or without its supervision, takes part: {who}"
            agreement["action"] = node_agreement.REFUSE
        return agreement

    def _say_root(self, agreement: Agreement) -> None:
        root = agreement["root"]
        if root is not None and root["host"] != self._facts["host"]:
            rank_of = root["diagnosis"]["root_rank"]
            where = f"host {root['host']}" + ("" if rank_of is None else f", rank {rank_of}")
            kind = root["diagnosis"]["kind"]
            say(f"attempt {root['attempt']} failed first on {where}: {kind}")

    def _begin(self, store: Any, rank: int, agreement: Agreement, agent: Any) -> None:
        hosts = {int(node): host for node, host in agreement["hosts"].items()}

        def end(why: str, lost: list[int]) -> None:
            if agent._worker_group.state.name != "HEALTHY" and not self._is_done:
                return
            names = ", ".join(f"node {node} ({hosts[node]})" for node in lost)
            text = f"{names}: {why}" if names else why
            self._write(loss_name(self._attempt), {"why": text, "nodes": lost})
            say(f"{text}; the attempt ends on {self._facts['host']}")
            node_watch.end_process(lambda: self._is_ending, lambda: _pids(agent))

        self._began = True
        if start := agreement["start"]:  # if ranks are restarted, nobody has looked for checkpoints
            restarts = agent._worker_group.spec.max_restarts > 0  # restarts within the attempt
            start = {**start, "evidence": start["evidence"] + 1, "offers": None}
            self._facts = {**self._facts, "start": start, "rerun": restarts}
        if not agreement["beats"]:
            return
        coming = torch_rendezvous.of_run(agent._worker_group.spec.rdzv_handler)
        self._watch = node_watch.NodeWatch(store, rank, hosts, self._attempt, end, coming)
        harmlessly("this node has no heartbeat", self._watch.start)

    # --- the end ---

    def _run(self, original: Callable[..., Any], agent: Any, *rest: Any) -> Any:
        result = None
        harmlessly("the agent's end is not seen", lambda: self._note_shutdown(agent))
        try:
            result = original(agent, *rest)
            return result
        finally:
            harmlessly(
                "the other nodes are not told of the end", lambda: self._ended(agent, result)
            )

    def _note_shutdown(self, agent: Any) -> None:
        shut_down = agent._shutdown

        def shutdown(*args: Any, **kwargs: Any) -> Any:
            self._is_ending = True
            return shut_down(*args, **kwargs)

        agent._shutdown = shutdown

    def _ended(self, agent: Any, result: Any) -> None:
        if self._watch is not None:
            torch_rendezvous.bound_close(agent._worker_group.spec.rdzv_handler, self._watch)
            succeeded = result is not None and not result.is_failed()
            if succeeded:
                self._watch.stop()
            else:
                self._watch.fail()
            error = sys.exc_info()[1]  # only we raise SystemExit
            failed = error.code if isinstance(error, SystemExit) else 1
            self._watch.leave_with(0 if succeeded else int(failed or 0))

    def _exit_barrier(self, original: Callable[..., Any], agent: Any, *rest: Any) -> Any:
        """Wait, in Python so that signals are handled, until the ranks of all nodes have ended."""
        if self._watch is not None:
            self._is_done = True
            wait = functools.partial(self._await_all, agent, self._watch)
            harmlessly("the other nodes' ends are not waited for", wait)
        return original(agent, *rest)

    def _await_all(self, agent: Any, watch: node_watch.NodeWatch) -> None:
        store, size = torch_rendezvous.ours(agent._store), agent._worker_group.group_world_size
        begun, longest_s = time.monotonic(), node_watch.every_s(size) / 2
        try:
            if store.add(node_watch.DONE, 1) >= size:
                store.set(node_watch.ALL_DONE, "1")
            while not store.check([node_watch.ALL_DONE]) and not watch.lost:
                waited_s = time.monotonic() - begun
                time.sleep(min(longest_s, DONE_LOOK_S + waited_s / meeting.LOOKS))
        except RuntimeError as error:
            if not is_of_torch(error):
                raise
            time.sleep(node_watch.RANKS_S + node_watch.BEAT_S)  # for the watch to report the reason
            raise SystemExit(1) from None
        if watch.lost:
            raise SystemExit(1)
        watch.stop()

    def _write(self, name: str, content: MeetingOutcome | LostNodes) -> None:
        """Write a file for the supervisor, which decides alone if there is none."""
        if self._directory is None:
            return
        try:
            files.make_directory(self._directory)
            content["at"] = time.time()
            files.replace(os.path.join(self._directory, name), json.dumps(content).encode())
        except OSError as error:
            say(fault(f"{name} could not be written", error))


def _chance() -> float:
    """Return a random number from 0 to 1."""
    return int.from_bytes(os.urandom(2), "big") / 0xFFFF


def _pids(agent: Any) -> list[int]:
    context = getattr(agent, "_pcontext", None)
    return [] if context is None else list(context.pids().values())
