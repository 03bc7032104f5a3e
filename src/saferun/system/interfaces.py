"""The addresses of the machine's network interfaces: the kernel's list for IPv4, /proc for IPv6."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

from saferun.base import proc

_SIOCGIFCONF = 0x8912  # linux/sockios.h
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux: a name of 16 bytes, a sockaddr, padding


def addresses() -> list[tuple[str, str]]:
    """Return interface and address, an interface's own address before those of its aliases."""
    found: list[tuple[str, str]] = []
    buffer = array.array("B", bytes(256 * _IFREQ_BYTES))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
            size = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    except OSError:
        size = 0
    entries = buffer.tobytes()[:size]
    for at in range(0, size - _IFREQ_BYTES + 1, _IFREQ_BYTES):
        name = entries[at : at + 16].split(b"\0")[0].decode().partition(":")[0]
        found.append((name, socket.inet_ntoa(entries[at + 20 : at + 24])))
    rows = map(str.split, proc.text("/proc/net/if_inet6").splitlines())
    ipv6 = [(row[5], bytes.fromhex(row[0])) for row in rows if len(row) == 6]
    return found + [(name, socket.inet_ntop(socket.AF_INET6, packed)) for name, packed in ipv6]


def is_loopback(address: str) -> bool:
    """Return whether an address is of this machine alone."""
    return address.startswith("127.") or address == "::1"
