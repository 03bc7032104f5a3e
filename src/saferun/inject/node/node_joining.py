"""Explain the wait for other nodes: who is there, and what does not fit.

Target: the c10d rendezvous of torch.distributed.elastic, torch >= 2.4: `_store` and `_state_holder`
of its handler (rendezvous/dynamic_rendezvous.py).
Reason: torchrun's agents wait in silence, for 600 s by default, where an endpoint is wrong, where
nodes were given different `--nnodes`, and where clocks differ: each node judges the others'
heartbeats by its own clock, and drops those that are 15 s off.
Delete it when torchrun names these.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import cut, durations, meeting
from ..context import say
from . import node_agreement, node_return
from .node_agreement import Agreement, NodeFacts

Refuse = Callable[[Agreement], None]

WAITED_S = 30.0  # torchrun itself gives up a connection after 60 s
LEAVE_S = 3.0  # the store goes with its host, and the others look once a second
SELDOM_S = 0.9  # between two questions for a refusal: nodes that join at once read states in bursts
FAULT_CHARS = 300  # a message is cut there: torch's may have a C++ stack
DELAY_S = 5.0  # the age that a heartbeat may have when it is first seen
WORD_FILE = "word"  # lies in a directory that a node offers (supervise/nodes/shared_reports.py)
SIGNALLED = "SignalException"  # raised by torchrun's handler of SIGTERM: a subclass of Exception

_reported: set[str] = set()  # the lines about faults of ours


class Joining:
    """A node that waits for the others in a c10d rendezvous.

    Args:
        facts: of this node.
        refuse: ends the agent, since the nodes do not fit.
        back: who has come back.
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
        """Say in a while where this node waits, unless `end` comes before."""
        self.end()
        what = "the wait for other nodes is not explained"  # a thread's fault is many lines
        explain = functools.partial(harmlessly, what, lambda: say(self._waiting(endpoint)))
        self._timer = threading.Timer(WAITED_S, explain)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Note that the nodes have come together, or that this one goes."""
        if self._timer is not None:
            self._timer.cancel()
        if self._holder is not None:
            self._holder.__dict__.pop("_sanitize", None)

    def watch(self, handler: Any, run_id: str) -> None:
        """Compare this node with the first one, and look at each state of the rendezvous.

        Args:
            handler: of the rendezvous; nothing happens where it is none of c10d.
            run_id: --rdzv-id.
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
                original()  # torch's heartbeat, in which nobody would end the agent
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
        """Look at a state that has just been read, before silent nodes are taken out of it."""
        if time.monotonic() - self._asked_at >= SELDOM_S:
            self._asked_at = time.monotonic()
            if self._store.check([f"{self._prefix}/refused"]):
                self._refuse(json.loads(self._store.get(f"{self._prefix}/refused")))
            self._back.raise_if_over()
        before_s, self._looked_at = self._looked_at, time.monotonic()
        is_first, unseen_s = not before_s, self._looked_at - before_s
        clock = sys.modules[type(handler).__module__].datetime  # as torch itself asks it
        settings, ours = handler.settings, handler._this_node
        limit_s = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        for node, beat in self._holder.state.last_heartbeats.items():
            before = self._seen.get(node)
            self._seen[node] = beat
            if not is_first:
                self._back.seen(node.addr)
            late_s = (clock.now(beat.tzinfo) - beat).total_seconds()
            is_new = beat != before and not is_first  # else it may be of a node that is gone
            is_late = is_new and late_s > limit_s + DELAY_S + unseen_s
            if node != ours and (late_s < -limit_s or is_late):
                here = self._facts["host"]
                why = f"the clock of {node.addr} is {durations.seconds(abs(late_s))} "
                why += f"{'ahead of' if late_s < 0 else 'behind'} that of {here}"
                self._tell(node_agreement.refusal(self._facts, {"0": here, "1": node.addr}, why))

    def _tell(self, refusal: Agreement) -> None:
        """Refuse, and have the others do so, too."""
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


def compare(facts: dict[int, NodeFacts]) -> Agreement:
    """Compare all nodes on one of them, which looks for their directories."""
    unseen = [node for node in facts if not _sees(facts[node].get("shared", ""))]
    return node_agreement.agree(facts, unseen)


def _sees(shared: str) -> bool:
    """Tell whether a directory that a node offers is the same one here, by the word in it."""
    if not shared:
        return False
    place, word = json.loads(shared)
    try:
        with open(os.path.join(place, WORD_FILE), encoding="utf-8") as file:
            return bool(file.read(len(word) + 1) == word)
    except (OSError, UnicodeError):
        return False


def addresses(host: str) -> str:
    """Return the addresses that a name has here, in words."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return "a name that is not known here"
    loops = all(address.startswith("127.") or address == "::1" for address in found)
    note = ", which is each node itself" if loops else ""
    return ", ".join(sorted(found)) + note


def fault(what: str, error: Exception) -> str:
    """Return a line about a fault of ours; its end tells a diagnosis that it ended nothing."""
    message = cut.beginning(" ".join(str(error).split()), FAULT_CHARS)
    return f"{what}: {type(error).__name__}: {message}; the job goes on"


def is_of_torch(error: Exception) -> bool:
    """Tell whether an exception is no fault of ours: a lost store, or a signal."""
    is_ours = isinstance(error, (meeting.NoResultError, NotImplementedError, RecursionError))
    return type(error).__name__ == SIGNALLED or (isinstance(error, RuntimeError) and not is_ours)


def harmlessly(what: str, act: Callable[[], Any], *, store: bool = False) -> Any:
    """Do something; a fault of ours is one line, and the job goes on.

    Args:
        what: follows from a fault.
        act: what is done.
        store: it asks the agents' store, and the caller wants to know where that is lost.
    """
    try:
        return act()
    except Exception as error:
        if type(error).__name__ == SIGNALLED or (store and is_of_torch(error)):
            raise
        line = fault(what, error)
        if line not in _reported:  # a node that tries again to join meets a fault again
            _reported.add(line)
            say(line)
        return None
