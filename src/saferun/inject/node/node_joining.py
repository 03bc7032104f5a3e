"""Explain the wait for other nodes: which have come, and which settings do not fit.

Target: the c10d rendezvous of torch.distributed.elastic, torch >= 2.4: `_store` and `_state_holder`
of its handler (rendezvous/dynamic_rendezvous.py).
Reason: torchrun's agents wait silently, for 600 s by default, if an endpoint is wrong, if nodes
have different `--nnodes`, or if clocks differ: each node judges the others' heartbeats by its own
clock, and drops those that are 15 s off.
Delete it when torchrun names these.
"""

from __future__ import annotations

import functools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ...base import durations
from .. import cut, meeting
from ..context import say
from . import node_agreement, node_return
from .node_agreement import Agreement, NodeFacts

Refuse = Callable[[Agreement], None]

WAITED_S = 30.0  # torchrun itself gives up a connection after 60 s
LEAVE_S = 3.0  # the store ends with its host, and the others look once a second
SELDOM_S = 0.9  # between two checks for a refusal: nodes that join read states in bursts
FAULT_CHARS = 300  # longest message: torch's may contain a C++ stack
DELAY_S = 5.0  # allowed age of a heartbeat when it is first seen
SIGNALLED = "SignalException"  # raised by torchrun's handler of SIGTERM: a subclass of Exception

_reported: set[str] = set()  # lines about our own faults that were printed


class Joining:
    """A node that waits for the others in a c10d rendezvous.

    Args:
        facts: this node's facts.
        refuse: function that ends the agent because the nodes do not fit.
        back: the nodes that have come back.
    """

    def __init__(self, facts: NodeFacts, refuse: Refuse, back: node_return.Return) -> None:
        self._facts, self._refuse, self._back = facts, refuse, back
        self._holder: Any = None
        self._store: Any = None
        self._seen: dict[Any, Any] = {}  # node -> its last heartbeat
        self._looked_at = 0.0
        self._asked_at = -SELDOM_S
        self._prefix = ""
        self._timer: threading.Timer | None = None

    def begin(self, endpoint: str, say: Callable[[str], None]) -> None:
        """Report after a while where this node waits, unless `end` comes before."""
        self.end()
        what = "the wait for other nodes is not explained"  # a thread's traceback has many lines
        explain = functools.partial(harmlessly, what, lambda: say(self._waiting(endpoint)))
        self._timer = threading.Timer(WAITED_S, explain)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Note that the nodes have met, or that this one leaves."""
        if self._timer is not None:
            self._timer.cancel()
        if self._holder is not None:
            self._holder.__dict__.pop("_sanitize", None)

    def watch(self, handler: Any, run_id: str) -> None:
        """Compare this node with the first one, and examine each state of the rendezvous.

        Args:
            handler: the rendezvous' handler; nothing happens if it is not c10d's.
            run_id: value of --rdzv-id.
        """
        self._holder = getattr(handler, "_state_holder", None)
        self._store = getattr(handler, "_store", None)
        if self._holder is None or not hasattr(self._holder, "_sanitize"):
            return
        run = f"saferun/{run_id}"
        self._prefix = f"{run}/{self._facts['attempt']}"
        original = self._holder._sanitize

        def sanitize() -> None:
            if threading.current_thread() is not threading.main_thread():
                original()  # torch's heartbeat thread, which cannot end the agent
                return
            try:
                self._look_at_state(handler)
            except Exception as error:  # another torch, or a connection that the caller notices
                self._holder.__dict__.pop("_sanitize", None)
                if type(error).__name__ == SIGNALLED or isinstance(error, node_return.Over):
                    raise
                if not is_of_torch(error):
                    say(fault("the other nodes are not looked at", error))
            original()

        self._holder._sanitize = sanitize
        self._back.begin(self._store, run_id, handler._this_node.addr)
        mine = json.dumps({key: self._facts.get(key) for key in ("host", *node_agreement.NAMES)})
        first = self._store.compare_set(f"{run}/first", "", mine).decode()
        if first != mine:
            self._compare(json.loads(first))

    def _compare(self, first: dict[str, Any]) -> None:
        pair: Any = {0: first, 1: self._facts}
        hosts = {str(node): fact["host"] for node, fact in pair.items()}
        if why := node_agreement.differences(pair, hosts):
            self._tell(node_agreement.refusal(self._facts, hosts, why))

    def _look_at_state(self, handler: Any) -> None:
        """Examine a newly read state, before silent nodes are removed from it."""
        if time.monotonic() - self._asked_at >= SELDOM_S:
            self._asked_at = time.monotonic()
            if self._store.check([f"{self._prefix}/refused"]):
                self._refuse(json.loads(self._store.get(f"{self._prefix}/refused")))
            self._back.raise_if_over()
        before_s, self._looked_at = self._looked_at, time.monotonic()
        is_first, unseen_s = not before_s, self._looked_at - before_s
        clock = sys.modules[type(handler).__module__].datetime  # as torch itself reads it
        settings, ours = handler.settings, handler._this_node
        limit_s = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        for node, beat in self._holder.state.last_heartbeats.items():
            before = self._seen.get(node)
            self._seen[node] = beat
            if not is_first:
                self._back.seen(node.addr)
            late_s = (clock.now(beat.tzinfo) - beat).total_seconds()
            is_new = beat != before and not is_first  # otherwise it may be of a node that is gone
            is_late = is_new and late_s > limit_s + DELAY_S + unseen_s
            if node != ours and (late_s < -limit_s or is_late):
                here = self._facts["host"]
                why = f"the clock of {node.addr} is {durations.seconds(abs(late_s))} "
                why += f"{'ahead of' if late_s < 0 else 'behind'} that of {here}"
                self._tell(node_agreement.refusal(self._facts, {"0": here, "1": node.addr}, why))

    def _tell(self, refusal: Agreement) -> None:
        """Refuse, and make the other nodes refuse, too."""
        self._store.set(f"{self._prefix}/refused", json.dumps(refusal))
        time.sleep(LEAVE_S)
        self._refuse(refusal)

    def _waiting(self, endpoint: str) -> str:
        host = endpoint.rpartition(":")[0] or endpoint
        where = f"{endpoint} ({addresses(host)})"
        if not endpoint:  # torchrun's c10d rendezvous then takes this name
            where = f"localhost ({addresses('localhost')}, as no --rdzv-endpoint is given)"
        here = self._back.here()
        if self._holder is not None:
            here = [node.addr for node in self._holder.state.participants]
        elif not here:
            return (
                f"{self._facts['host']} has waited for an answer from {where} for "
                f"{WAITED_S:.0f} s; is that the right host and port, and is it up?"
            )
        names = ", ".join(sorted(here)) or "none"
        return (
            f"{self._facts['host']} has waited for other nodes at {where} for {WAITED_S:.0f} s; "
            f"--nnodes is {self._facts['nnodes']}, and these have come: {names}"
        )


def addresses(host: str) -> str:
    """Return the addresses of a name on this machine, in words."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return "a name that is not known here"
    loops = all(address.startswith("127.") or address == "::1" for address in found)
    note = ", which is each node itself" if loops else ""
    return ", ".join(sorted(found)) + note


def fault(what: str, error: Exception) -> str:
    """Return a line about a saferun fault; its end tells a diagnosis that it ended nothing."""
    message = cut.beginning(" ".join(str(error).split()), FAULT_CHARS)
    return f"{what}: {type(error).__name__}: {message}; the job goes on"


def is_of_torch(error: Exception) -> bool:
    """Return whether an exception is no fault of saferun: a lost store, or a signal."""
    is_ours = isinstance(error, (meeting.NoResultError, NotImplementedError, RecursionError))
    return type(error).__name__ == SIGNALLED or (isinstance(error, RuntimeError) and not is_ours)


def harmlessly(what: str, act: Callable[[], Any], *, store: bool = False) -> Any:
    """Do an action; a fault of saferun in it becomes one line, and the job continues.

    Args:
        what: consequence of a fault, for the line.
        act: the action.
        store: the action uses the agents' store, and a lost store is raised to the caller.
    """
    try:
        return act()
    except Exception as error:
        if type(error).__name__ == SIGNALLED or (store and is_of_torch(error)):
            raise
        line = fault(what, error)
        if line not in _reported:  # a node that retries to join meets the same fault again
            _reported.add(line)
            say(line)
        return None
