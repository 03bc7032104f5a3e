"""What the meeting of ranks costs the host of their store, without the processes of ranks."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from store_counter import Proxy, flat, free_port

SOURCE = Path(__file__).resolve().parent.parent / "src"
LIMIT_S = 150.0
ARGV = [
    *("train.py", "--layers=48", "--width=6144", "--data=/shared/data/tokens", "--steps=100000"),
]


def ranks_meet(count: int) -> dict[str, Any]:
    """Have ranks meet as `hooks.init` has them meet twice: to compare facts, and as a barrier."""
    sys.path.insert(0, str(SOURCE))
    import torch.distributed as dist

    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    proxy = Proxy(port)
    results: list[float] = []
    connected = threading.Barrier(count)

    def rank(number: int) -> None:
        store = dist.TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False)
        connected.wait()
        results.append(_meet_twice(store, number, count))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = proxy.counts()
    proxy.close()
    del server
    if len(results) < count:
        raise SystemExit(f"only {len(results)} of {count} ranks met")
    return {"ranks": count, "seconds": max(results), **flat(counts)}


def _meet_twice(store: Any, number: int, count: int) -> float:
    """Return the seconds that a rank took to compare its facts and to pass the barrier."""
    import torch
    import torch.distributed as dist

    from saferun.inject import meeting
    from saferun.inject.rank_differences import RankFacts, compare

    facts: RankFacts = {
        **{"world_size": count, "torch": torch.__version__, "cuda": "13.0", "nccl": "2.28.9"},
        **{"gpu": "NVIDIA H200", "mitigations": "none", "barrier": "store", "argv": ARGV},
        **{"local": str(number % 8), "node": str(number // 8)},
    }  # type: ignore[typeddict-item]  # parts of one dict
    began = time.monotonic()
    for what, brought in (("check-in", facts), ("barrier", {})):
        own: Any = dist.PrefixStore(f"saferun/{what}", store)
        compared, missing = meeting.meet(own, number, count, brought, compare, LIMIT_S)
        assert not missing
        assert not compared["differences"]
    return time.monotonic() - began
