"""A meeting of ranks in a torch store: each checks in, one compares all, all read the result.

One key wakes all of them, so a thousand ranks cost a few thousand small requests and no burst of
polling. Only the first to arrive polls, at long intervals, until the time is over; then it compares
the ranks that are there. (A blocking `wait` that times out writes two C++ warnings per rank.)

This module imports nothing of torch: the stores come from the caller.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

Facts = TypeVar("Facts", bound=Mapping[str, Any])
Result = TypeVar("Result")


class Store(Protocol):
    """The functions of torch.distributed.Store that a meeting needs."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


# The wait between two looks is a twentieth of the time waited so far: 1 ms for ranks that come
# together, at most 0.25 s, which is four requests a second to a store that a thousand ranks use.
FIRST_LOOK_S, LAST_LOOK_S, LOOKS = 0.001, 0.25, 20
EARLY_S = 0.5  # a wait that ends this long before its limit has broken: two clocks time it
SLACK_S = 5.0  # the others wait this much longer, so that only one rank compares
LINGER_S = 5.0  # the store's host stays this long for the others to read the result


class NoResultError(RuntimeError):
    """The rank that compares all facts has published no result, but the store works."""


def meet(
    store: Store,
    rank: int,
    size: int,
    facts: Facts,
    compare: Callable[[dict[int, Facts]], Result],
    timeout_s: float,
    never_come: Callable[[], Collection[int]] = tuple,
) -> tuple[Result, list[int]]:
    """Check in as `rank` of `size` and return the result: the same on every rank.

    Args:
        store: a torch store whose keys belong to this one meeting.
        rank: the rank of this process.
        size: the number of ranks.
        facts: facts about this rank, JSON values only.
        compare: function from facts by rank to JSON values; called on one rank.
        timeout_s: how long the first rank to arrive waits.
        never_come: function that returns the ranks for which nobody waits.

    Returns:
        The result of `compare`, and the missing ranks (empty if all came, or nobody waits for
        the others).

    Raises:
        NoResultError: no rank published a result in time.
        RuntimeError: the store broke.
    """
    store.set(_key(rank), json.dumps(facts))
    arrived = store.add("count", 1)

    def is_complete() -> bool:
        return bool(absent := never_come()) and store.add("count", 0) + len(absent) >= size

    if arrived >= size or not _await_result(store, arrived == 1, timeout_s, is_complete):
        _publish(store, sorted({*range(size)} - {*never_come()}), compare)
    result, missing = json.loads(store.get("result").decode())
    return result, missing


def leave(store: Store, size: int, *, stays: bool) -> None:
    """Report that this rank has read the result; the store's host stays until all have.

    Args:
        store: the store of the meeting.
        size: the number of ranks.
        stays: this rank is the host, or may be.
    """
    if store.add("left", 1) >= size:
        store.set("all left", "1")
    if stays:
        poll(store, "all left", LINGER_S)


def own_connection(store: Any) -> Any:
    """Return our own connection: a request that blocks on it does not block other requests."""
    try:
        return store.clone()
    except Exception:  # torch < 2.8, a FileStore or a store that the script made
        return store


def poll(store: Store, key: str, timeout_s: float, ends: Callable[[], bool] = bool) -> bool:
    """Return whether a key appeared in time; looks seldom, and never logs.

    Args:
        store: the store in which it may appear.
        key: the key's name.
        timeout_s: how long to look, in seconds.
        ends: function that returns whether to look no longer.
    """
    start = time.monotonic()
    while not store.check([key]):
        waited_s = time.monotonic() - start
        if waited_s >= timeout_s or ends():
            return False
        left_s = timeout_s - waited_s
        time.sleep(min(LAST_LOOK_S, FIRST_LOOK_S + waited_s / LOOKS, FIRST_LOOK_S + left_s))
    return True


def _await_result(store: Store, is_first: bool, timeout_s: float, ends: Callable[[], bool]) -> bool:
    if is_first:
        return poll(store, "result", timeout_s, ends)
    bound_s = timeout_s + SLACK_S
    start = time.monotonic()
    try:
        store.wait(["result"], datetime.timedelta(seconds=bound_s))
    except RuntimeError:
        if time.monotonic() - start < bound_s - EARLY_S:
            raise  # the store broke; a wait that merely timed out is an answer
        return False
    return True


def _publish(store: Store, ranks: list[int], compare: Callable[[dict[int, Facts]], Result]) -> None:
    """Compare and publish the result, or wait for it if another rank does so."""
    if store.add("comparing", 1) > 1:
        if not poll(store, "result", SLACK_S):
            raise NoResultError("the rank that compares all ranks published no result")
        return
    facts = {rank: json.loads(store.get(_key(rank)).decode()) for rank in _present(store, ranks)}
    missing = [rank for rank in ranks if rank not in facts]
    store.set("result", json.dumps([compare(facts), missing]))


def _present(store: Store, ranks: list[int]) -> list[int]:
    if store.check([_key(rank) for rank in ranks]):
        return ranks
    return [rank for rank in ranks if store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"rank/{rank}"
