"""torch's rendezvous as an agent of several nodes uses it: opened, bounded in time, closed.

Target: torch.distributed.elastic, torch >= 2.4: `get_rendezvous_handler` (rendezvous/registry.py)
and the handlers that it returns (rendezvous/dynamic_rendezvous.py, static_tcp_rendezvous.py).
Reason: torch waits for other nodes, for their store and for its end by limits of its own, which
fit no attempt after the first; node_agent.py says for how long this node waits.
Delete it when torchrun's own limits can be set from outside for each attempt.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import hidden_frames
from ..context import say
from . import node_return, node_watch
from .node_agreement import NodeFacts
from .node_joining import Joining, harmlessly

# Nodes that join write one state in turn, and a node whose write came too late tries again. After a
# failure all nodes come at the same time, so each waits a random part of this, multiplied by the
# number of nodes.
SPREAD_S, LONGEST_SPREAD_S = 0.005, 5.0
CONNECT_S = 60.0  # torch's own limit for a store
CLOSE_S = 5.0  # limit for closing the rendezvous: its host may have lost power
LAST_CALL_S = 30  # torchrun's own --rdzv-conf last_call_timeout=


class TorchRendezvous:
    """The rendezvous of one agent.

    Args:
        facts: this node's facts.
        rejoin_s: how long this node waits for the others after a failure.
        expects: other nodes have just left to come back.
        back: the nodes that have come back.
        joining: explains the wait for other nodes.
    """

    def __init__(
        self,
        facts: NodeFacts,
        rejoin_s: float,
        expects: bool,
        back: node_return.Return,
        joining: Joining,
    ) -> None:
        self._facts, self._rejoin_s, self._expects = facts, rejoin_s, expects
        self._is_first = facts["attempt"] == 1
        self._back, self._joining = back, joining
        self._make: Callable[[Any], Any] | None = None  # get_rendezvous_handler of torch
        self._parameters: Any = None  # its arguments
        self._read_timeout: bool | None = None  # whether the user has set it

    def hook(self, registry: ModuleType, handler: Callable[[], Any]) -> None:
        """From the second attempt on, limit the time to join to retry.rejoin_s.

        Args:
            registry: torch's module.
            handler: returns the handler of the rendezvous, by `opened`.
        """
        self._make = registry.get_rendezvous_handler

        @hidden_frames.replace(registry, "get_rendezvous_handler")
        def get_rendezvous_handler(original: Callable[[Any], Any], params: Any) -> Any:
            self._parameters = params
            harmlessly("the time to join is not bounded", lambda: self._bound(params))
            begin = functools.partial(self._joining.begin, self.endpoint, say)
            harmlessly("the wait for other nodes is not explained", begin)
            return handler()

    @property
    def endpoint(self) -> str:
        """Return where the nodes meet; "" if unknown."""
        return str(getattr(self._parameters, "endpoint", ""))

    @property
    def is_hooked(self) -> bool:
        """Return whether another handler can be made."""
        return self._make is not None

    @property
    def spread_s(self) -> float:
        """Return the seconds over which the nodes that come back spread their ways."""
        return min(LONGEST_SPREAD_S, SPREAD_S * getattr(self._parameters, "min_nodes", 1))

    def _bound(self, params: Any) -> None:
        if self._is_first:
            return
        least, most = getattr(params, "min_nodes", 1), getattr(params, "max_nodes", 1)
        last_call_s = int(params.get("last_call_timeout", LAST_CALL_S)) if least < most else 0
        if self._expects and last_call_s:  # otherwise the first of them would begin alone
            last_call_s = max(last_call_s, LAST_CALL_S)
            params.config["last_call_timeout"] = last_call_s
        params.config.setdefault("join_timeout", int(self._rejoin_s) + last_call_s)
        if params.backend == "static":
            limit = int(params.config.get("timeout", self._rejoin_s))
            params.config["timeout"] = min(limit, int(self._rejoin_s))

    def _bound_connect(self, limit: float, least_s: float) -> None:
        """Let torch give up a store that does not answer when our time is over, not later."""
        if self._is_first or self._parameters.backend != "c10d":
            return
        left_s = max(least_s, min(CONNECT_S, limit - time.monotonic()))
        if self._read_timeout is None:
            self._read_timeout = "read_timeout" in self._parameters.config
        if not self._read_timeout:
            self._parameters.config["read_timeout"] = int(left_s)

    def opened(self, limit: float, least_s: float) -> Any:
        """Return a new handler, which makes torch connect to its store.

        Args:
            limit: when this node's time is over, by the monotonic clock.
            least_s: seconds that the connection may take at least.
        """
        assert self._make is not None
        bound = functools.partial(self._bound_connect, limit, least_s)
        harmlessly("the time to connect is torch's own", bound)
        handler = self._make(self._parameters)
        if handler.get_backend() == "static":
            come = node_return.come_statically
            come = functools.partial(come, handler, self._back, self._facts, limit)
            handler.next_rendezvous = come
        watch = functools.partial(self._joining.watch, handler, self._parameters.run_id)
        # In attempt 1 torch itself notices a lost store.
        harmlessly("the other nodes are not looked at", watch, store=not self._is_first)
        return handler

    def holds(self) -> bool:
        """Return whether this node hosts the rendezvous' store, according to torch itself."""
        if self._parameters.backend == "static":
            return int(self._parameters.config.get("rank", 0)) == 0
        given = self._parameters.get_as_bool("is_host")
        if given is not None:
            return bool(given)
        utils = sys.modules["torch.distributed.elastic.rendezvous.utils"]
        host, _ = utils.parse_rendezvous_endpoint(self._parameters.endpoint, default_port=0)
        return bool(utils._matches_machine_hostname(host))


def forget_address(handler: Any) -> None:
    """Have torch publish the address of its store again, in a second round.

    If the host stays the same, torch does not do so (dynamic_rendezvous.py), and a new node waits
    for it in vain.
    """
    if getattr(handler, "_bootstrap_store_info", None) is not None:
        handler._bootstrap_store_info = None


def leave(handler: Any) -> None:
    """End the heartbeats of a handler, which the others would take for a node that is present."""
    getattr(handler, "_stop_heartbeats", lambda: None)()


def hosts(handler: Any) -> dict[int, str]:
    """Return the hosts by node rank, from a c10d rendezvous; {} for any other."""
    holder = getattr(handler, "_state_holder", None)
    participants = holder.state.participants if holder is not None else {}
    return {rank: node.addr for node, rank in participants.items()}


def ours(store: Any, name: str = "saferun") -> Any:
    """Return the part of a store that is ours."""
    return sys.modules["torch.distributed"].PrefixStore(name, store)


def of_run(handler: Any) -> Any:
    """Return our part of the store in which nodes come to the run; None without one."""
    raw = getattr(handler, "_store", None)
    return None if raw is None else ours(raw, f"saferun/{handler.get_run_id()}")


def bound_close(handler: Any, watch: node_watch.NodeWatch) -> None:
    """Make torch wait at most CLOSE_S for the rendezvous to be closed.

    A host that has lost power closes no connection, so torch would wait for its answer until the
    kernel gives up (924 s; tcp_retries2 in Documentation/networking/ip-sysctl.rst).
    """
    close = handler.shutdown

    def shutdown() -> bool:
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(close())
            except BaseException as error:
                answers.append(error)

        watch.closing = threading.Thread(target=ask, name="saferun-nodes", daemon=True)
        watch.closing.start()
        watch.closing.join(CLOSE_S)
        if not answers:
            say(f"the host of the rendezvous has not answered for {CLOSE_S:.0f} s at the end")
            return False
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return bool(answers[0])

    handler.shutdown = shutdown
