"""Watch the other nodes of an attempt by each agent's heartbeat in the agents' store.

torchrun's own agents do not notice a node that goes silent: the static rendezvous has no
heartbeats, and the c10d rendezvous looks at them only while nodes join. A job over NCCL then waits
for its watchdog (10 minutes), and an agent in the exit barrier for 300 s, after which it exits with
status 0.

Each node writes a counter every BEAT_S. Node 0 reads all counters and writes one word for all, so a
beat costs the store's host O(nodes) small requests. A node is silent if its counter has not changed
for LOST_S by the *observer's* clock: clocks of different nodes are never compared. A broken
connection shows immediately that the host's agent has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ..context import say
from ..meeting import own_connection
from .node_joining import SIGNALLED, fault, harmlessly, is_of_torch

BEAT_S = 2.0  # LONGEST_BEAT_S from 1,000 nodes on, to spare the host
LONGEST_BEAT_S = 10.0
GONE_LOOK_S = 0.5  # between two checks for a lost store, each of which costs its host a request
# A network outage that heals within 30 s harms no job and must not end one. The silence, plus the
# time for a stuck agent and its ranks to end, stays below a minute.
LOST_S = 40.0
# If a node has just come under another node's name, the other one is most likely gone; but it still
# lives if one host has two nodes.
RETURNED_S, RETURNED_BEATS = 8.0, 4
RANKS_S = 4.0  # before the agent is ended: its ranks may still report what they saw
STUCK_S = 8.0  # the agent's main thread may hang in a dead connection and miss the signal
TERM_S = 5.0  # time for the ranks of a stuck agent to end
STORE_LOOK_S = 1.0  # between checks whether the store answers, which need no request
STALE_S = 0.1  # limit for telling the others if the store has not answered for two beats
RETURN_S = 0.5  # limit for the beating thread's request at the process's end
ENDING_LOOK_S = 0.1  # between checks whether the main thread has handled the signal: STUCK_S / 80
WORD, WANTED, DONE, ALL_DONE = "word", "wanted", "done", "all done"


def every_s(size: int) -> float:
    """Return the seconds between two heartbeats of one node, for a number of nodes."""
    return min(LONGEST_BEAT_S, BEAT_S + size / 125)


def first_beat_s(node: int, size: int) -> float:
    """Return the seconds from the meeting to a node's first beat; they avoid bursts at the host."""
    return every_s(size) * node / size


def prepare(store: Any, size: int) -> bool:
    """Create, on node 0, the keys that all nodes read, before any node begins to watch.

    Args:
        store: the agents' store.
        size: the number of nodes.

    Returns:
        Whether the store can hold heartbeats; a file cannot.
    """
    keys = [*(_beat(node) for node in range(size)), WORD]
    try:
        store.multi_set(keys, ["0"] * size + ['{"n": 0}'])
        return bool(len(store.multi_get(keys)) == len(keys))
    except Exception as error:
        if type(error).__name__ == SIGNALLED:
            raise
        return False


class Beats:
    """The beats of all nodes as one node sees them, by its own clock.

    Args:
        size: the number of nodes.
        now: the present time in seconds.
    """

    def __init__(self, size: int, now: float) -> None:
        self._seen = dict.fromkeys(range(size), ("0", now))

    def silent(
        self, values: list[str], now: float, doubted: Collection[int] = (), soon_s: float = LOST_S
    ) -> list[int]:
        """Return the nodes whose counter has not changed for LOST_S.

        Args:
            values: the values of all counters, by node.
            now: the present time in seconds.
            doubted: nodes whose names other, new nodes seem to have taken.
            soon_s: limit for these nodes, instead of LOST_S.
        """
        for node, value in enumerate(values):
            if value != self._seen[node][0]:
                self._seen[node] = (value, now)
        limits = dict.fromkeys(doubted, soon_s)
        return [n for n, (_, at) in self._seen.items() if now - at > limits.get(n, LOST_S)]


class NodeWatch:
    """The heartbeat of this node, and its watch over the others.

    Args:
        store: the agents' store, with a prefix for this watch.
        node: this node's rank.
        hosts: host by node rank.
        attempt: the attempt's number.
        end: function that ends the agent; gets the reason and the lost nodes.
        coming: store to which new nodes write their names (node_return.py); None for none.
    """

    def __init__(
        self,
        store: Any,
        node: int,
        hosts: dict[int, str],
        attempt: int,
        end: Callable[[str, list[int]], None],
        coming: Any = None,
    ) -> None:
        self._coming, self._came, self._doubted = coming, -1, set[int]()
        self._store, self._node, self._hosts, self._attempt = store, node, hosts, attempt
        self._end = end
        self._stopped = threading.Event()
        self._wake = threading.Event()  # tells the beating thread not to wait for its next beat
        self._failed = threading.Event()  # the attempt has failed on this node
        self._told = threading.Event()  # the others know that
        self._answered_at = time.monotonic()
        self._word = (0, self._answered_at)  # node 0's count, and when it changed
        self._ended = threading.Lock()
        self._every_s = every_s(len(hosts))
        self._beating = threading.Thread(target=self._beat_on, name="saferun-nodes", daemon=True)
        self.closing: threading.Thread | None = None  # closes the rendezvous at the end
        self._is_blind = False  # after a fault of saferun: this node beats but no longer watches
        self.lost = ""

    def start(self) -> None:
        """Begin to beat and to watch."""
        self._beating.start()
        threading.Thread(target=self._watch_the_store, name="saferun-nodes", daemon=True).start()

    def stop(self) -> None:
        """End the watch: the attempt is over on this node."""
        self._stopped.set()
        self._wake.set()

    def leave_with(self, status: int) -> None:
        """End this process with a status if the beating thread is still inside torch by then.

        A thread that returns from C++ while the interpreter ends aborts the process, up to Python
        3.13 (https://github.com/python/cpython/issues/87135).

        Args:
            status: the status with which torchrun is about to end.
        """
        atexit.register(self._leave, status)

    def _leave(self, status: int) -> None:
        if self._beating.is_alive():
            self._beating.join(RETURN_S)
        if self._beating.is_alive() or (self.closing is not None and self.closing.is_alive()):
            for stream in (sys.stdout, sys.stderr):
                harmlessly("the last output is lost", stream.flush)
            os._exit(status)

    def fail(self) -> None:
        """Tell the others that the attempt has failed on this node; returns within 2 * BEAT_S."""
        if self._stopped.is_set():
            return
        self._failed.set()
        self._wake.set()
        is_fresh = time.monotonic() - self._answered_at < 2 * self._every_s
        self._told.wait(2 * BEAT_S if is_fresh else STALE_S)
        self.stop()

    def _beat_on(self) -> None:
        beats, count = Beats(len(self._hosts), time.monotonic()), 0
        try:
            store = own_connection(self._store)
            self._coming = None if self._coming is None else own_connection(self._coming)
            self._wake.wait(first_beat_s(self._node, len(self._hosts)))
            while not self._stopped.is_set():
                count += 1
                self._beat(store, beats, count)
                self._answered_at = time.monotonic()
                self._wake.wait(self._every_s)
                if self._failed.is_set() and not self._told.is_set():
                    store.set(WANTED, str(self._attempt + 1))
                    self._told.set()
                    return
        except RuntimeError:  # the connection broke; torch's store errors are RuntimeErrors
            self._told.set()
            self._lose("the agent that holds the rendezvous has ended", [], RANKS_S)

    def _beat(self, store: Any, beats: Beats, count: int) -> None:
        store.set(_beat(self._node), str(count))
        try:
            self._judge(store, beats, count)
        except Exception as error:
            if is_of_torch(error):
                raise
            if not self._is_blind:
                say(fault("the other nodes are not watched", error))
            self._is_blind = True
            if self._node == 0:  # a missing beat would end the attempt on the others
                store.set(WORD, json.dumps({"n": count, "silent": []}))

    def _judge(self, store: Any, beats: Beats, count: int) -> None:
        now, size = time.monotonic(), len(self._hosts)
        if self._node == 0:
            values = [v.decode() for v in store.multi_get([_beat(node) for node in range(size)])]
            self._doubt()
            soon_s = max(RETURNED_S, RETURNED_BEATS * self._every_s)
            silent = beats.silent(values, now, self._doubted, soon_s)
            store.set(WORD, json.dumps({"n": count, "silent": silent}))
        else:
            word = json.loads(store.get(WORD))
            if word["n"] != self._word[0]:
                self._word = (word["n"], now)
            silent = word.get("silent", []) or ([0] if now - self._word[1] > LOST_S else [])
        if silent := [node for node in silent if node != self._node]:
            why = f"no heartbeat for {LOST_S:.0f} s"
            if self._doubted.issuperset(silent):
                why = "no heartbeat, and it has been started again"
            self._lose(why, silent, 0.0)
        elif store.check([WANTED]) and int(store.get(WANTED)) > self._attempt:
            self._lose("another node has failed", [], RANKS_S)

    def _doubt(self) -> None:
        """Read which new nodes have come since the ranks began."""
        if self._coming is None:
            return
        count = self._coming.add("new", 0)
        for number in range(self._came + 1 if self._came >= 0 else count + 1, count + 1):
            if not self._coming.check([f"new/{number}"]):
                return  # the node will write its name soon
            name = self._coming.get(f"new/{number}").decode()
            self._doubted |= {n for n, host in self._hosts.items() if host == name}
            self._came = number
        self._came = max(self._came, count)

    def _watch_the_store(self) -> None:
        """Check that the store answers: a host that lost power closes no connection."""
        while not self._stopped.wait(STORE_LOOK_S):
            if time.monotonic() - self._answered_at > LOST_S:
                text = f"the host of the rendezvous has not answered for {LOST_S:.0f} s"
                self._lose(text, [], 0.0)
                return

    def _lose(self, why: str, nodes: list[int], patience_s: float) -> None:
        """End this agent, unless its attempt ends by itself before."""
        if self._stopped.wait(patience_s) or not self._ended.acquire(blocking=False):
            return
        self.lost = why
        harmlessly("the attempt is not ended", lambda: self._end(why, nodes))


def end_process(is_ending: Callable[[], bool], ranks: Callable[[], list[int]]) -> None:
    """End this agent with its ranks, as a SIGTERM does; by force if it hangs in a connection.

    Args:
        is_ending: returns whether the agent's main thread has begun to end its ranks.
        ranks: returns the ranks' pids.
    """
    os.kill(os.getpid(), signal.SIGTERM)
    limit = time.monotonic() + STUCK_S
    while time.monotonic() < limit:
        if is_ending():
            return
        time.sleep(ENDING_LOOK_S)
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, 0.0)):
        for pid in ranks():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        time.sleep(wait_s)
    os._exit(1)


def _beat(node: int) -> str:
    return f"beat/{node}"


def await_earlier(store: Any, attempt: int, bound_s: float) -> bool:
    """Let the agents of an earlier attempt end, if they have met in a store.

    Args:
        store: the agent's store, with our prefix.
        attempt: the number of the attempt that begins.
        bound_s: how long to wait, in seconds.

    Returns:
        Whether there were such agents, and their store still exists.

    Raises:
        RuntimeError: the store is gone.
    """
    if not store.check(["result"]):
        return False
    store.set(WANTED, str(attempt))
    limit = time.monotonic() + bound_s
    while time.monotonic() < limit:
        store.check(["result"])
        time.sleep(GONE_LOOK_S)
    return True
