"""Ask NCCL's RAS twice how many collectives each rank has launched, without waiting.

A rank of NCCL 2.24 and later listens on localhost:28028, or at NCCL_RAS_ADDR, unless
NCCL_RAS_ENABLE is 0. The protocol consists of lines of text (NVIDIA/nccl, src/ras/client.cc).
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Mapping

from saferun.base import proc
from saferun.diagnosis import ras
from saferun.diagnosis.flight_record import CollectiveFinding
from saferun.diagnosis.silence import RankSign

LIMIT_S = 13.0  # for both requests; RAS waits up to 5 s for a process
BETWEEN_S = 2.0
_MOST_BYTES = 16 << 20
_ADDRESS = ("127.0.0.1", 28028)
_QUESTION = b"CLIENT PROTOCOL 2\nSET FORMAT json\nVERBOSE STATUS\n"


class RasQuery:
    """Two answers about the job of some ranks, read as they come.

    Args:
        ranks: this machine's ranks, including ended ones.
        at_s: the current time, by any clock that does not jump.
        is_wanted: whether NCCL may be in use.
    """

    def __init__(self, ranks: Iterable[RankSign], at_s: float, *, is_wanted: bool) -> None:
        self._pids = {one.pid: one.rank for one in ranks if one.rank is not None}
        self._until_s, self._next_s = at_s + LIMIT_S, at_s
        self._answers: list[ras.Communicators] = []
        self._content = b""
        self._socket: socket.socket | None = None
        environs = map(proc.environ, sorted(self._pids)) if is_wanted else ()
        environ = next(filter(None, environs), {})  # a rank may have ended
        size = environ.get("WORLD_SIZE", "")
        self._world = int(size) if size.isdecimal() and len(size) < 10 else len(self._pids)
        self._address = _address(environ) if environ and self._world > 1 else None

    def are_ready(self, at_s: float) -> bool:
        """Return whether no more answers will come."""
        if self._address is None:
            return True
        try:
            if self._socket is None and at_s >= self._next_s:
                self._ask(self._address)
            elif self._socket is not None and self._has_ended(self._socket):
                self._take(at_s)
        except OSError:  # nobody listens there
            self._close()
        if at_s >= self._until_s:
            self._close()
        return self._address is None

    def finding(self) -> CollectiveFinding | None:
        """Return who is behind; None if unknown."""
        if len(self._answers) < 2:
            return None
        before, after = self._answers
        return ras.compare(before, after, self._pids, self._world)

    def _ask(self, address: tuple[str, int]) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket, self._content = socket.socket(family, socket.SOCK_STREAM), b""
        self._socket.settimeout(0.2)  # on this machine it answers at once or never
        self._socket.connect(address)
        self._socket.sendall(_QUESTION)
        self._socket.setblocking(False)

    def _has_ended(self, answering: socket.socket) -> bool:
        with contextlib.suppress(BlockingIOError):
            while part := answering.recv(1 << 16):
                self._content += part
                if len(self._content) > _MOST_BYTES:
                    raise OSError("too long an answer")
            return True
        return False

    def _take(self, at_s: float) -> None:
        answer = ras.read(self._content)
        if answer is None:
            self._close()
            return
        self._answers.append(answer)
        if len(self._answers) == 2:
            self._close()
            return
        if self._socket is not None:
            self._socket.close()
        self._socket, self._next_s = None, at_s + BETWEEN_S

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._address = None


def _address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where a rank's RAS listens; None if it is off or the address is invalid."""
    if environ.get("NCCL_RAS_ENABLE") == "0":
        return None
    given = environ.get("NCCL_RAS_ADDR")
    if not given:
        return _ADDRESS
    found = re.fullmatch(r"\[?(localhost|[0-9.]{7,15}|[0-9a-fA-F:]{2,39})\]?:(\d{1,5})", given)
    if found is None:
        return None
    return ("127.0.0.1" if found[1] == "localhost" else found[1]), int(found[2])
