"""A TCP proxy in front of torch's TCPStore that counts requests by their kind and key.

It reads the requests of torch's protocol (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, the same
from torch 2.4 to 2.13) and passes every byte on unchanged. A connection whose requests it cannot
read is still carried, and counted under "?".
"""

from __future__ import annotations

import asyncio
import collections
import re
import socket
import threading
import time
from collections.abc import Generator
from typing import Any, NamedTuple

# What follows the byte of each kind: k a key, v a value, K keys, P pairs of both, digits: bytes.
PARTS = ["4", "kv", "kvv", "k", "k8", "K", "K", "", "k", "kv", "K", "P", "", "4", "kv", "k1", "k"]
KINDS = [
    *("validate", "set", "compare_set", "get", "add", "check", "wait", "num_keys", "delete"),
    *("append", "multi_get", "multi_set", "cancel_wait", "ping", "queue_push", "queue_pop"),
    "queue_len",
]
REACH_S = 120.0  # a client is held until the store is up, as torch's own would try again
RENDEZVOUS = "torch.rendezvous"


class Request(NamedTuple):
    """What requests are counted by."""

    kind: str
    key: str  # with # for every number in it


class Counts(NamedTuple):
    """What was counted up to a moment."""

    requests: dict[Request, int]
    sent: dict[Request, int]  # bytes of the requests
    received: int  # bytes of all answers
    connections: int
    peak: int  # requests in the busiest second
    last_join_at: float  # when the last connection first asked for the rendezvous; Unix seconds

    def __sub__(self, before: object) -> Counts:
        """Return what came after an earlier moment; `peak` and `last_join_at` stay."""
        assert isinstance(before, Counts)
        requests = _less(self.requests, before.requests)
        sent = _less(self.sent, before.sent)
        received = self.received - before.received
        connections = self.connections - before.connections
        return self._replace(
            requests=requests, sent=sent, received=received, connections=connections
        )


def _less(now: dict[Request, int], before: dict[Request, int]) -> dict[Request, int]:
    left = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in left.items() if count}


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes on to `port`, in a thread of its own."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._requests: collections.Counter[Request] = collections.Counter()
        self._sent: collections.Counter[Request] = collections.Counter()
        self._seconds: collections.Counter[int] = collections.Counter()
        self._received = self._connections = 0
        self._last_join_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        begun = asyncio.run_coroutine_threadsafe(self._begin(), self._loop)
        self._server = begun.result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _begin(self) -> asyncio.Server:
        return await asyncio.start_server(self._carry, "127.0.0.1", 0, backlog=4096)

    def counts(self) -> Counts:
        """Return what has been counted so far."""

        async def copied() -> Counts:
            numbers = (self._received, self._connections, max(self._seconds.values(), default=0))
            return Counts(dict(self._requests), dict(self._sent), *numbers, self._last_join_at)

        return asyncio.run_coroutine_threadsafe(copied(), self._loop).result()

    def close(self) -> None:
        """Stop; open connections are dropped."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _finish(self) -> None:
        self._server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = time.monotonic() + REACH_S
        self._connections += 1
        while True:
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
                break
            except OSError:
                if time.monotonic() > limit:
                    writer.close()
                    return
                await asyncio.sleep(0.05)  # the host's store is not there yet
        back = asyncio.create_task(self._answer(far_reader, writer))
        await self._ask(reader, far_writer)
        await back

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = _Parser(self)
        try:
            while data := await reader.read(1 << 18):
                parser.feed(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 18):
                self._received += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    def note(self, request: Request, size: int, *, is_first: bool) -> None:
        """Count a request of `size` bytes, the first of its connection about this key or not."""
        self._requests[request] += 1
        self._sent[request] += size
        self._seconds[int(time.monotonic())] += 1
        if is_first and RENDEZVOUS in request.key.rpartition("/")[2]:  # the state, nothing below it
            self._last_join_at = time.time()


class _Parser:
    """Divides the bytes of a connection into requests."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._keys: set[str] = set()
        self._buffer = bytearray()
        self._size = 0
        self._steps = self._read()
        self._want = next(self._steps)  # above 0: so many bytes to read; below: to skip

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self._buffer += data
        while self._want:
            size = abs(self._want)
            here = min(size, len(self._buffer))
            if self._want > 0 and here < size:
                return
            taken = bytes(self._buffer[:here])
            del self._buffer[:here]
            self._size += here
            if here < size:
                self._want += here
                return
            self._want = self._steps.send(taken)
        self._buffer.clear()  # not to be understood: the rest is only carried

    def _read(self) -> Generator[int, bytes, None]:
        while True:
            self._size = 0
            kind = (yield 1)[0]
            if kind >= len(PARTS):
                self._proxy.note(Request("?", str(kind)), 1, is_first=False)
                yield 0
            key = ""
            for part in PARTS[kind]:
                key = (yield from self._part(part)) or key
            is_first = key not in self._keys
            self._keys.add(key)
            self._proxy.note(Request(KINDS[kind], key), self._size, is_first=is_first)

    def _part(self, part: str) -> Generator[int, bytes, str]:
        if part.isdigit():
            yield int(part)
            return ""
        if part in "kv":
            return (yield from self._text(is_key=part == "k"))
        key = ""
        for _ in range(int.from_bytes((yield 8), "little")):
            key = yield from self._text(is_key=True)
            if part == "P":
                yield from self._text(is_key=False)
        return key

    def _text(self, *, is_key: bool) -> Generator[int, bytes, str]:
        size = int.from_bytes((yield 8), "little")
        if size and not is_key:
            yield -size
        content = (yield size) if size and is_key else b""
        return re.sub(r"\d+", "#", content.decode("utf-8", "replace"))


def flat(counts: Counts) -> dict[str, Any]:
    """Return counts as JSON has them, ours apart from torch's own."""

    def kind(key: str) -> str:
        return "saferun" if "saferun" in key else "join" if RENDEZVOUS in key else "other"

    def table(by: dict[Any, int]) -> dict[str, int]:
        found = dict.fromkeys(("saferun", "join", "other"), 0)
        for request, count in by.items():
            found[kind(request.key)] += count
        return found

    each = sorted(counts.requests.items(), key=lambda pair: -pair[1])
    return {
        "requests": table(counts.requests),
        "sent_bytes": table(counts.sent),
        "received_bytes": counts.received,
        "connections": counts.connections,
        "peak_requests_per_s": counts.peak,
        "each": {f"{request.kind} {request.key}": count for request, count in each},
    }


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])
