"""A server that answers as NCCL's RAS does."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def ras(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer the question of each connection; yield the address."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as one:
                    asked = b""
                    while b"STATUS\n" not in asked:
                        asked += one.recv(1 << 12)
                    one.sendall(answer(asked))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def of_ranks(launched: dict[int, tuple[int, int]], *missing: dict[str, Any]) -> bytes:
    """Return an answer from {rank: (pid, collectives that it has launched)}."""
    ranks = [
        {"rank": rank, "host": "h", "pid": pid, "collective_counts": {"AllReduce": count}}
        for rank, (pid, count) in launched.items()
    ]
    one = {"hash": "0x1", "secondary_hash": "0x2", "ranks": ranks, "missing_ranks": missing}
    return b"SERVER PROTOCOL 2\nOK\n" + json.dumps({"communicators": [one]}).encode()
