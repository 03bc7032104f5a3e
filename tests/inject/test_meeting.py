"""Ranks that meet in a store, with threads as ranks and one real TCPStore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from saferun.inject import meeting


def results(
    size: int,
    present: Iterable[int],
    timeout_s: float,
    compare: Callable[[dict[int, Any]], Any] = lambda facts: None,
) -> list[tuple[Any, list[int]]]:
    """What each present rank of `size` gets from one meeting."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[int, tuple[Any, list[int]]] = {}

    def attend(rank: int) -> None:
        own = dist.TCPStore(
            "127.0.0.1", host.port, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        store = dist.PrefixStore("meeting", own)
        found[rank] = meeting.meet(store, rank, size, {"rank": rank}, compare, timeout_s)

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return list(found.values())


def test_one_rank_compares_and_all_read_the_same() -> None:
    compared = []

    def compare(facts: dict[int, Any]) -> int:
        compared.append(facts)
        return sum(fact["rank"] for fact in facts.values())

    assert results(16, range(16), 30, compare) == [(120, [])] * 16
    assert len(compared) == 1


def test_all_who_wait_learn_who_is_missing_when_the_first_runs_out_of_time() -> None:
    """Nobody waits for a time-out of its own: those that wait longer would compare once more."""
    compared: list[object] = []
    assert results(4, [0, 2, 3], 0.5, compared.append) == [(None, [1])] * 3
    assert len(compared) == 1
