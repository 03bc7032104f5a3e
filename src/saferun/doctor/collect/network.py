"""The machine's network: interfaces, the host name, who holds a port, RDMA devices.

Read from /sys and /proc. Nothing is sent anywhere, except to resolve our own host name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import replace

from saferun.doctor.vitals import InfiniBand, Interface, Network, Port
from saferun.system import procfs
from saferun.system.printable import printable
from saferun.system.redact import Masker

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFF_UP = 0x1
_LISTEN = "0A"  # include/net/tcp_states.h


def interfaces(
    sys_net: str = "/sys/class/net", if_inet6: str = "/proc/net/if_inet6"
) -> tuple[Interface, ...]:
    """Return the interfaces by index, the order in which getifaddrs lists IPv4 addresses."""
    inet6 = _with_ipv6(if_inet6)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in sorted(socket.if_nameindex()):
            base = os.path.join(sys_net, name)
            flags = int(_line(f"{base}/flags") or "0x1", 16)
            speed = _line(f"{base}/speed")
            found.append(
                Interface(
                    name,
                    up=bool(flags & _IFF_UP),
                    carrier=_line(f"{base}/carrier") != "0",  # unreadable while it is down
                    ipv4=_ipv4(query, name),
                    ipv6=name in inet6,
                    speed_mbps=int(speed) if speed.lstrip("-").isdecimal() else -1,
                )
            )
    return tuple(found)


def _ipv4(query: socket.socket, name: str) -> str:
    try:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""


def _with_ipv6(path: str) -> set[str]:
    """Return the interfaces (last field) with an IPv6 address (first field) other than ::1."""
    rows = [line.split() for line in procfs.text(path).splitlines()]
    return {row[-1] for row in rows if len(row) == 6 and row[0] != "0" * 31 + "1"}


def resolve(hostname: str) -> tuple[tuple[str, ...], str, float]:
    """Return the addresses of a host name in order, why there are none, and the seconds taken."""
    began = time.monotonic()
    trouble, addresses = "", []
    try:
        for *_, address in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM):
            addresses.append(str(address[0]))
    except (OSError, UnicodeError) as error:
        trouble = getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(addresses)), trouble, time.monotonic() - began


def port(number: int, masker: Masker, proc: str = "/proc") -> Port:
    """Return whether a process listens on a TCP port, and which where that is visible.

    Args:
        number: the port.
        masker: takes secrets out of the process's command line.
        proc: the directory of processes.
    """
    sockets = {
        row[9]
        for table in ("tcp", "tcp6")
        for row in map(str.split, procfs.text(f"{proc}/net/{table}").splitlines()[1:])
        if len(row) > 9 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == number
    }
    if not sockets:
        return Port(number)
    pid = _owner({f"socket:[{inode}]" for inode in sockets}, proc)
    command = "" if pid is None else _command(pid, masker, proc)
    return Port(number, taken=True, pid=pid, command=command)


def _owner(links: set[str], proc: str) -> int | None:
    """Return a process that has one of these sockets open; only our own user's are visible."""
    for pid in filter(str.isdecimal, os.listdir(proc)):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{proc}/{pid}/fd"):
                with contextlib.suppress(OSError):  # it may be closed by now
                    if os.readlink(f"{proc}/{pid}/fd/{name}") in links:
                        return int(pid)
    return None


def _command(pid: int, masker: Masker, proc: str) -> str:
    argv = procfs.text(f"{proc}/{pid}/cmdline").rstrip("\0").split("\0")
    text = " ".join(masker.argv(argv))[:120]
    return printable(text)


def infiniband(folder: str = "/sys/class/infiniband") -> tuple[InfiniBand, ...]:
    """Return the ports of all RDMA devices."""
    found = []
    for device in procfs.names(folder):
        for number in procfs.names(f"{folder}/{device}/ports"):
            base = f"{folder}/{device}/ports/{number}"
            state, physical = _line(f"{base}/state"), _line(f"{base}/phys_state")
            found.append(
                InfiniBand(
                    device,
                    number,
                    state=state.rpartition(":")[2].strip(),  # "4: ACTIVE"
                    physical=physical.rpartition(":")[2].strip(),
                    rate=_line(f"{base}/rate"),
                    layer=_line(f"{base}/link_layer"),
                )
            )
    return tuple(found)


def examine(ports: Iterable[int], masker: Masker) -> Network:
    """Collect all facts of this module; the host name last, since it may wait for a server."""
    hostname = socket.gethostname()
    known = Network(
        hostname=hostname,
        interfaces=interfaces(),
        ports=tuple(port(number, masker) for number in ports),
        infiniband=infiniband(),
    )
    addresses, trouble, seconds = resolve(hostname)
    return replace(known, addresses=addresses, trouble=trouble, seconds=seconds)


def _line(path: str) -> str:
    return procfs.text(path).strip()
