"""The number of bytes that some processes' TCP connections have carried (sock_diag(7)).

No counter in /proc has the bytes of send(2) and recv(2): proc_pid_io(5) counts only read and write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from saferun.base import proc

_NETLINK, _SOCK_DIAG, _BY_FAMILY = 16, 4, 20  # linux/netlink.h, linux/sock_diag.h
_DUMP, _DONE, _ERROR = 0x301, 3, 2  # NLM_F_REQUEST | NLM_F_DUMP; NLMSG_DONE, NLMSG_ERROR
_INFO = 2  # INET_DIAG_INFO, whose bit is 1 << (2 - 1)
_BYTES = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received in tcp_info (Linux 4.1)
_ESTABLISHED = 1 << 1
_FAMILIES = (2, 10)  # AF_INET, AF_INET6
_LIMIT_S = 1.0


def moved(pids: Iterable[int]) -> int | None:
    """Return the bytes that these processes' open connections have carried; None if unknown."""
    wanted = {inode for pid in pids for inode in _sockets(pid)}
    if not wanted:
        return 0
    try:
        return sum(
            count
            for family in _FAMILIES
            for inode, count in _connections(family)
            if inode in wanted
        )
    except (OSError, struct.error):
        return None


def _sockets(pid: int) -> Iterator[int]:
    targets = proc.descriptors(pid).values()
    return (int(target[8:-1]) for target in targets if target.startswith("socket:["))


def _connections(family: int) -> Iterator[tuple[int, int]]:
    """Yield the inode of each established connection, and the bytes that it has carried."""
    import socket  # 3 ms; only a job that is silent for long needs it

    with socket.socket(_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.settimeout(_LIMIT_S)
        asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
        body = asked + bytes(48)  # any address
        link.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _DUMP, 1, 0) + body)
        while True:
            for kind, message in _messages(link.recv(1 << 18)):
                if kind in (_DONE, _ERROR):
                    return
                yield struct.unpack_from("=I", message, 68)[0], _carried(message)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if length < 16:
            return
        yield kind, data[at + 16 : at + length]
        at += (length + 3) & ~3


def _carried(message: bytes) -> int:
    at = 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        if kind == _INFO and length >= 4 + _BYTES + 16:
            acked, received = struct.unpack_from("=QQ", message, at + 4 + _BYTES)
            return int(acked + received)
        at += (length + 3) & ~3
    return 0
