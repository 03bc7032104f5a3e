"""Ranks that meet in a torch store: each checks in, one judges, all read the one verdict.

One key wakes everybody, so a thousand ranks cost a few thousand small requests and no polling
storm: only the first to arrive looks again and again, seldom, until the time is up; then it
judges with whoever is there. (A blocking `wait` that runs out writes two C++ warnings per rank.)

Imports nothing of torch: the stores come from the caller.
"""

from __future__ import annotations

import time

SLACK_S = 5.0  # the others wait this much longer, so that one rank judges and not all of them
LINGER_S = 5.0  # a rank that hosts the store stays this long for the others to read the verdict


def meet(store, rank, size, facts, judge, timeout_s):
    """Check in as `rank` of `size` and return the verdict: the same dict on every rank.

    Args:
        store: a torch store whose keys belong to this one meeting.
        facts: what this rank says about itself, JSON values only.
        judge: facts by rank -> dict of JSON values; called on one rank.
        timeout_s: how long the first to arrive waits.

    Returns:
        What `judge` said, with "missing": the ranks that were not there (empty when all were).

    Raises:
        RuntimeError: the store broke, or nobody came to a verdict in time.
    """
    import json

    store.set(_key(rank), json.dumps(facts))
    arrived = store.add("count", 1)
    if arrived >= size or not _await_verdict(store, arrived == 1, timeout_s):
        _publish(store, size, judge)
    return json.loads(store.get("verdict").decode())


def leave(store, rank, size):
    """Let rank 0, which may host the store, stay until everybody has read the verdict."""
    if store.add("left", 1) >= size:
        store.set("all left", "1")
    if rank == 0:
        poll(store, "all left", LINGER_S)


def poll(store, key, timeout_s):
    """Return whether `key` appeared within `timeout_s`; looks seldom, and never logs."""
    start = time.monotonic()
    while not store.check([key]):
        waited_s = time.monotonic() - start
        if waited_s >= timeout_s:
            return False
        time.sleep(min(0.25, 0.001 + waited_s / 20, timeout_s - waited_s + 0.001))
    return True


def _await_verdict(store, first, timeout_s):
    if first:
        return poll(store, "verdict", timeout_s)
    import datetime

    bound_s = timeout_s + SLACK_S
    start = time.monotonic()
    try:
        store.wait(["verdict"], datetime.timedelta(seconds=bound_s))
    except RuntimeError:
        if time.monotonic() - start < bound_s - 0.5:
            raise  # the store broke; a wait that ran out is an answer
        return False
    return True


def _publish(store, size, judge):
    """Judge and publish, unless somebody else does: then wait for that."""
    import json

    if store.add("judges", 1) > 1:
        if not poll(store, "verdict", SLACK_S):
            raise RuntimeError("the rank that compares all ranks came to no verdict")
        return
    facts = {rank: json.loads(store.get(_key(rank)).decode()) for rank in _present(store, size)}
    missing = [rank for rank in range(size) if rank not in facts]
    store.set("verdict", json.dumps(dict(judge(facts), missing=missing)))


def _present(store, size):
    keys = [_key(rank) for rank in range(size)]
    if store.check(keys):
        return range(size)
    return [rank for rank, key in enumerate(keys) if store.check([key])]


def _key(rank):
    return "rank/%d" % rank
