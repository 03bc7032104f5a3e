"""What a node asks of the store while it waits for the others in a rendezvous."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.inject import node_joining

assert datetime  # the module of a handler has it, as torch's has


class Store:
    """A store that counts the questions for a refusal."""

    def __init__(self) -> None:
        self.asked = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return False


class Holder:
    """torch's state holder, which looks at each state that it reads."""

    state = SimpleNamespace(last_heartbeats={}, participants={})

    def _sanitize(self) -> None:
        return


class Handler:
    """torch's handler of a c10d rendezvous."""

    def __init__(self) -> None:
        self._store, self._state_holder = Store(), Holder()
        self._this_node = SimpleNamespace(addr="h0")
        beat = timedelta(seconds=5)
        self.settings = SimpleNamespace(keep_alive_interval=beat, keep_alive_max_attempt=3)


@pytest.mark.parametrize(("seldom_s", "asked"), [(1000.0, 1), (0.0, 20)])
def test_a_burst_of_states_brings_no_burst_of_questions(
    monkeypatch: pytest.MonkeyPatch, seldom_s: float, asked: int
):
    """Nodes that join at once read the state anew whenever another one has changed it."""
    monkeypatch.setattr(node_joining, "SELDOM_S", seldom_s)
    facts: Any = {"host": "h0", "attempt": 1}
    back: Any = SimpleNamespace(
        begin=lambda *_: None, seen=lambda _: None, raise_if_over=lambda: None
    )
    joining, handler = node_joining.Joining(facts, lambda agreement: None, back), Handler()
    joining.watch(handler, "job")
    for _ in range(20):
        handler._state_holder._sanitize()
    assert handler._store.asked == asked
