"""Pure: which interfaces NCCL and gloo would use, and whether other machines reach them.

NCCL's choice: src/misc/socket.cc (`ncclFindInterfaces`, `matchIfList`) and the variable
NCCL_SOCKET_IFNAME, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. Gloo's
choice: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (`createDefaultDevice`): the address that
the host name resolves to and that can be bound, else 127.0.0.1, unless GLOO_SOCKET_IFNAME names
interfaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from saferun.base.durations import seconds
from saferun.doctor.vitals import Interface, Network, Port
from saferun.model import NOTE, OK, PROBLEM, Finding
from saferun.system.interfaces import is_loopback

SLOW_S = 2.0  # above this, resolving our own host name is slow; each rank does it
_OTHERS = ("^docker,lo,virbr", "docker", "lo", "virbr")  # tried in this order, after "ib"


def many_nodes(environ: Mapping[str, str]) -> bool:
    """Return whether the environment describes a job on several machines."""
    for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PET_NNODES", "NNODES", "PBS_NUM_NODES"):
        first = environ.get(name, "").partition(":")[0]
        if first.isdecimal() and int(first) > 1:
            return True
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    return world.isdecimal() and local.isdecimal() and int(world) > int(local)


def nccl_interfaces(found: Sequence[Interface], wanted: str = "") -> tuple[Interface, ...]:
    """Return the interfaces that NCCL would use; the first one serves the rendezvous.

    Args:
        found: the interfaces, by index.
        wanted: value of NCCL_SOCKET_IFNAME; NCCL ignores a single character.
    """
    with_address = [*(i for i in found if i.ipv4), *(i for i in found if not i.ipv4 and i.ipv6)]
    if len(wanted) > 1:
        return tuple(i for i in with_address if _matches(i.name, wanted))
    for rule in ("ib", *_OTHERS):
        chosen = tuple(i for i in with_address if _matches(i.name, rule))
        if chosen:
            return chosen
    return ()


def _matches(name: str, rule: str) -> bool:
    """Match as NCCL does: by prefix; a leading `^` inverts; then `=` requires whole names."""
    inverted = rule.startswith("^")
    rule = rule.removeprefix("^")
    exact = rule.startswith("=")
    listed = [item.partition(":")[0] for item in rule.removeprefix("=").split(",") if item]
    hit = any(name == item if exact else name.startswith(item) for item in listed)
    return hit != inverted


def nccl(network: Network, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the interface that NCCL would use."""
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = nccl_interfaces(network.interfaces, wanted)
    names = ", ".join(i.name for i in network.interfaces if i.ipv4 or i.ipv6)
    if not network.interfaces:
        return
    if not chosen and len(wanted) > 1:
        what = f"NCCL_SOCKET_IFNAME={wanted} matches no interface with an address"
        fix = f"unset it, or name one of these: {names or 'there is none'}"
        yield Finding(PROBLEM, "network", what, "NCCL: no socket interface found", fix)
        return
    if not chosen:
        fix = "give the container a network"
        yield Finding(PROBLEM, "network", "no interface has an address: NCCL fails", "", fix)
        return
    first = chosen[0]
    rest = f", then {', '.join(i.name for i in chosen[1:6])}" if chosen[1:] else ""
    what = f"NCCL takes {first.name} ({first.ipv4 or 'IPv6'}{_speed(first)}){rest}"
    yield _reach(first, what, "NCCL_SOCKET_IFNAME", many_nodes(environ), names)


def _reach(first: Interface, what: str, variable: str, many: bool, names: str) -> Finding:
    fix = f"export {variable}=NAME; there are {names}"
    if not (first.up and first.carrier):
        return Finding(PROBLEM, "network", f"{what}: it is down", "", fix)
    if first.name == "lo" and many:
        return Finding(PROBLEM, "network", f"{what}: no other machine is there", "", fix)
    if many and first.name.startswith(("docker", "virbr", "veth", "br-")):
        return Finding(PROBLEM, "network", f"{what}: it leads to containers only", "", fix)
    return Finding(OK, "network", what)


def _speed(interface: Interface) -> str:
    return f", {interface.speed_mbps / 1000:g} Gb/s" if interface.speed_mbps > 0 else ""


def gloo(network: Network, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the interface that gloo would use: the one to which the host name resolves."""
    many = many_nodes(environ)
    names = {i.name: i for i in network.interfaces}
    listed = ", ".join(name for name, i in names.items() if i.ipv4 or i.ipv6)
    wanted = [w for w in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if w]
    if wanted:
        missing = [name for name in wanted if name not in names]
        if missing:
            what = f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which is not here"
            yield Finding(PROBLEM, "network", what, "", f"there are {listed}")
            return
        first = names[wanted[0]]
        what = f"gloo takes {first.name} ({first.ipv4 or 'IPv6'}{_speed(first)})"
        yield _reach(first, what, "GLOO_SOCKET_IFNAME", many, listed)
        return
    if network.hostname:
        yield _by_name(network, many, listed)


def _by_name(network: Network, many: bool, listed: str) -> Finding:
    """Judge where gloo listens without GLOO_SOCKET_IFNAME: at the host name's addresses."""
    name, level = network.hostname, PROBLEM if many else NOTE
    fix = f"a line for {name} in /etc/hosts, or export GLOO_SOCKET_IFNAME=NAME; there are {listed}"
    if not network.addresses:
        what = f"the host name {name} does not resolve: gloo takes 127.0.0.1"
        return Finding(level, "host name", what, network.trouble, fix)
    local = {i.ipv4: i.name for i in network.interfaces if i.ipv4}
    own = [a for a in network.addresses if a in local or is_loopback(a) or ":" in a]
    if not own:
        what = f"the host name {name} resolves to {network.addresses[0]}, not to this machine"
        return Finding(level, "host name", what, "gloo takes 127.0.0.1 then", fix)
    if is_loopback(own[0]):
        what = f"the host name {name} resolves to {own[0]}: gloo listens there"
        if many:
            return Finding(
                PROBLEM, "host name", f"{what}, which other machines cannot reach", "", fix
            )
        detail = "for a job on several machines it must be an address that they reach"
        return Finding(OK, "host name", what, detail)
    where = local.get(own[0], "IPv6")
    return Finding(OK, "network", f"gloo takes {where} ({own[0]}, of host name {name})")


def name_service(network: Network) -> Iterator[Finding]:
    """Check that the host name resolves quickly: every rank resolves it at every start."""
    if network.seconds > SLOW_S:
        what = f"resolving {network.hostname} took {seconds(network.seconds)}"
        fix = f"a line for {network.hostname} in /etc/hosts"
        yield Finding(NOTE, "host name", what, "every rank waits for that", fix)


def ports(network: Network) -> Iterator[Finding]:
    """Check that the port of torchrun's rendezvous is free."""
    for port in network.ports:
        if port.taken:
            what = f"port {port.number} is taken{_holder(port)}"
            detail = "torchrun without --standalone and --master-port meets there: EADDRINUSE"
            fix = f"end it, or give torchrun --master-port {port.number + 1}"
            yield Finding(PROBLEM, "port", what, detail, fix)
        else:
            yield Finding(OK, "port", f"{port.number} is free")


def _holder(port: Port) -> str:
    if port.pid is None:
        return " by a process of somebody else"
    return f" by pid {port.pid} ({port.command or 'unknown'})"
