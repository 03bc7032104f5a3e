"""Find out which nodes have come back for the next attempt, and tell all if some have not.

Target: the handlers of torch.distributed.elastic's rendezvous, torch >= 2.4: `_store` of both,
`_state_holder` of c10d's, `next_rendezvous` of the static one.
Reason: torchrun's agents wait silently, each with its own time limit. If the first agent that gives
up hosts the rendezvous' store, the store is gone, and the others cannot know which nodes were
missing. So each node writes its name, and its report on the last failure, to that store; the first
node that gives up writes there which nodes came, and all others end with the same result.

    saferun/RUN/new, new/N          nodes that come new: a counter, and the name of each
    saferun/RUN/host/ADDRESS        the name of a node by the address that c10d has of it
    saferun/RUN/ATTEMPT/report/N    reports (report: a counter)
    saferun/RUN/ATTEMPT/over        Alone of node_agreement.py
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from .node_agreement import Alone, NodeFacts, root_report

RECENT_S = 10.0  # a node that gave up this recently counts as having come
LOOK_S = 0.5  # between two checks of a static rendezvous whether all have come


class Over(Exception):  # noqa: N818 - it is no fault
    """The time limit of a node is over: not all have come back."""

    def __init__(self, alone: Alone) -> None:
        super().__init__("not all nodes came back")
        self.alone = alone


class Return:
    """The nodes of a run that come together again, as one of them sees them.

    Args:
        facts: this node's facts.
    """

    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts
        self._store: Any = None  # the rendezvous' store
        self._run = self._prefix = ""
        self._seen: dict[str, float] = {}  # address or host -> when it was last seen

    def begin(self, store: Any, run_id: str, address: str) -> None:
        """Write this node's name and report.

        Args:
            store: the rendezvous' store.
            run_id: value of --rdzv-id.
            address: this node's address in the rendezvous; "" for none.
        """
        self._store, self._run = store, f"saferun/{run_id}"
        self._prefix = f"{self._run}/{self._facts['attempt']}"
        host, report = self._facts["host"], self._facts.get("report")
        if address:
            store.set(f"{self._run}/host/{address}", host)
        if self._facts.get("start", {}).get("evidence") == 0:
            store.set(f"{self._run}/new/{store.add(f'{self._run}/new', 1)}", host)
        if report is not None:
            number = store.add(f"{self._prefix}/report", 1)
            store.set(f"{self._prefix}/report/{number}", json.dumps(report))

    def seen(self, name: str) -> None:
        """Note that a node is present, by its address or host."""
        self._seen[name] = time.monotonic()

    def here(self) -> list[str]:
        """Return the names that `seen` was called with."""
        return list(self._seen)

    def raise_if_over(self) -> None:
        """Raise Over if another node's time limit is over."""
        if self._store.check([f"{self._prefix}/over"]):
            raise Over(json.loads(self._store.get(f"{self._prefix}/over")))

    def over(self) -> Alone:
        """Tell all nodes that the time is over; return which nodes came."""
        since = time.monotonic() - RECENT_S
        came = [self._host(name) for name, at in self._seen.items() if at >= since]
        came.append(self._facts["host"])
        reports = [self._facts.get("report")]
        if self._store.check([f"{self._prefix}/report"]):
            for number in range(1, int(self._store.get(f"{self._prefix}/report")) + 1):
                key = f"{self._prefix}/report/{number}"
                reports += [json.loads(self._store.get(key))] if self._store.check([key]) else []
        alone: Alone = {"came": sorted(set(came)), "unreached": "", "root": root_report(reports)}
        first = self._store.compare_set(f"{self._prefix}/over", "", json.dumps(alone))
        told: Alone = json.loads(first)
        return told

    def _host(self, name: str) -> str:
        key = f"{self._run}/host/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else name


def come_statically(handler: Any, back: Return, facts: NodeFacts, limit: float) -> Any:
    """Join a static rendezvous; return the result of torch's own `next_rendezvous`.

    torch waits for the others inside its store. So the host opens the store before that, and all
    nodes check which have come. A new node waits as under torchrun.

    Args:
        handler: the rendezvous' handler.
        back: stores names and reports.
        facts: this node's facts.
        limit: until when a returning node waits, by the monotonic clock.

    Raises:
        Over: not all have come.
    """
    is_host, is_new = handler.rank == 0, facts["attempt"] == 1
    here, go = f"saferun/{handler.run_id}/here", f"saferun/{handler.run_id}/go"
    info: Any = None
    opened: Any = None
    if is_host and not is_new:
        opened = sys.modules["torch.distributed"].TCPStore(
            handler.master_addr,
            handler.master_port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=handler.timeout,
        )
    else:
        info = type(handler).next_rendezvous(handler)
    store = opened if info is None else handler._store
    back.begin(store, handler.run_id, "")
    store.set(f"{here}/{handler.rank}", facts["host"])
    while not is_new and not store.check([go]):
        missing = []
        for rank in range(handler.world_size):
            if store.check([f"{here}/{rank}"]):
                back.seen(store.get(f"{here}/{rank}").decode())
            else:
                missing.append(rank)
        if not missing and is_host:
            break
        back.raise_if_over()
        if time.monotonic() > limit:
            raise Over(back.over())
        time.sleep(LOOK_S)
    if is_host:
        store.set(go, "1")
    return type(handler).next_rendezvous(handler) if info is None else info
