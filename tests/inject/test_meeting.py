"""Ranks that meet in a store, with threads as ranks and one real TCPStore."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from saferun.inject import meeting

if TYPE_CHECKING:
    import torch.distributed as dist

TIMEOUT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def import_torch() -> None:
    """Import it for the tests, and not for each worker that only collects them."""
    global dist
    import torch.distributed as dist


def store_host() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def results(
    host: dist.TCPStore, size: int, present: Iterable[int], compare: Callable[[dict[int, Any]], Any]
) -> list[tuple[Any, list[int]]]:
    """What each present rank of `size` gets from one meeting."""
    found: dict[int, tuple[Any, list[int]]] = {}

    def attend(rank: int) -> None:
        own = dist.TCPStore(
            "127.0.0.1", host.port, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        store = dist.PrefixStore("meeting", own)
        found[rank] = meeting.meet(store, rank, size, {"rank": rank}, compare, TIMEOUT_S)

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return list(found.values())


def test_one_rank_compares_and_all_read_the_same():
    compared = []

    def compare(facts: dict[int, Any]) -> int:
        compared.append(facts)
        return sum(fact["rank"] for fact in facts.values())

    assert results(store_host(), 16, range(16), compare) == [(120, [])] * 16
    assert len(compared) == 1


class Clock:
    """Time that stands still until so many ranks have arrived, and then runs out at each look."""

    def __init__(self, host: dist.TCPStore, ranks: int) -> None:
        self._store = dist.PrefixStore("meeting", host)
        self._ranks = ranks
        self._now_s = 0.0

    def monotonic(self) -> float:
        if self._store.add("count", 0) >= self._ranks:
            self._now_s += TIMEOUT_S
        return self._now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))


def test_all_who_wait_learn_who_is_missing_when_the_first_runs_out_of_time(monkeypatch):
    """Nobody waits for a time-out of its own: those that wait longer would compare once more."""
    host = store_host()
    monkeypatch.setattr(meeting, "time", Clock(host, 3))
    compared: list[object] = []
    assert results(host, 4, [0, 2, 3], compared.append) == [(None, [1])] * 3
    assert len(compared) == 1
