"""The machine's network: interfaces, the host name, the process on a port, RDMA devices.

The facts are read from /sys and /proc. Nothing is sent, except to resolve our own host name.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import replace

from saferun.base import proc
from saferun.doctor.vitals import InfiniBand, Interface, Network, Port
from saferun.system.interfaces import addresses
from saferun.system.printable import printable
from saferun.system.redact import Masker

_IFF_UP = 0x1
_LISTEN = "0A"  # include/net/tcp_states.h


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces by index, the order in which getifaddrs lists IPv4 addresses."""
    known, found = addresses(), []
    for _, name in sorted(socket.if_nameindex()):
        base = f"/sys/class/net/{name}"
        flags = int(_line(f"{base}/flags") or "0x1", 16)
        speed = _line(f"{base}/speed")
        own = [address for interface, address in known if interface == name]
        found.append(
            Interface(
                name,
                up=bool(flags & _IFF_UP),
                carrier=_line(f"{base}/carrier") != "0",  # unreadable while it is down
                ipv4=next((address for address in own if ":" not in address), ""),
                ipv6=any(":" in address and address != "::1" for address in own),
                speed_mbps=int(speed) if speed.lstrip("-").isdecimal() else -1,
            )
        )
    return tuple(found)


def resolve(hostname: str) -> tuple[tuple[str, ...], str, float]:
    """Return the addresses of a host name in order, the error if none, and the seconds taken."""
    began = time.monotonic()
    trouble, found = "", []
    try:
        for *_, address in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM):
            found.append(str(address[0]))
    except (OSError, UnicodeError) as error:
        trouble = getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(found)), trouble, time.monotonic() - began


def port(number: int, masker: Masker) -> Port:
    """Return whether a process listens on a TCP port, and which process if it is visible.

    Args:
        number: the port.
        masker: removes secrets from the process's command line.
    """
    sockets = {
        row[9]
        for table in ("tcp", "tcp6")
        for row in map(str.split, proc.text(f"/proc/net/{table}").splitlines()[1:])
        if len(row) > 9 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == number
    }
    if not sockets:
        return Port(number)
    pid = _owner({f"socket:[{inode}]" for inode in sockets})
    command = "" if pid is None else _command(pid, masker)
    return Port(number, taken=True, pid=pid, command=command)


def _owner(links: set[str]) -> int | None:
    """Return a process that has one of these sockets open; only our own user's are visible."""
    return next((pid for pid in proc.pids() if links & {*proc.descriptors(pid).values()}), None)


def _command(pid: int, masker: Masker) -> str:
    text = " ".join(masker.argv(proc.command(pid)))[:120]
    return printable(text)


def infiniband(folder: str = "/sys/class/infiniband") -> tuple[InfiniBand, ...]:
    """Return the ports of all RDMA devices."""
    found = []
    for device in proc.names(folder):
        for number in proc.names(f"{folder}/{device}/ports"):
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
    """Collect all facts of this module; the host name comes last, since that may take long."""
    hostname = socket.gethostname()
    known = Network(
        hostname=hostname,
        interfaces=interfaces(),
        ports=tuple(port(number, masker) for number in ports),
        infiniband=infiniband(),
    )
    named, trouble, seconds = resolve(hostname)
    return replace(known, addresses=named, trouble=trouble, seconds=seconds)


def _line(path: str) -> str:
    return proc.text(path).strip()
