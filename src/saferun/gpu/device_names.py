"""The GPUs and MIG slices that locks are named after, and those that an ancestor holds already."""

from __future__ import annotations

import os
from collections.abc import Sequence

from saferun.model import Gpu
from saferun.named_tuple import NamedTuple
from saferun.system import procfs

VARIABLE = "SAFERUN_LOCKS"  # what ancestors hold: "<pid>:<start>:<device>,<device>;…"


class Device(NamedTuple):
    """A GPU or a MIG slice by the name that its files have."""

    name: str
    parent: str = ""  # the GPU of a slice


def device_name(uuid: str) -> str:
    """Return the one spelling of a UUID that files have: no separators, hexadecimal in lower case.

    >>> device_name("MIG-GPU-5D5BA0D6/13/0")
    'MIG-GPU-5d5ba0d6_13_0'
    """
    low = uuid.strip().lower()
    prefix = next((p for p in ("mig-gpu-", "mig-", "gpu-") if low.startswith(p)), "")
    rest = low[len(prefix) :][:120]
    return prefix.upper() + "".join(
        c if (c.isascii() and c.isalnum()) or c == "-" else "_" for c in rest
    )


def to_lock(gpus: Sequence[Gpu], held: set[str]) -> tuple[Device, ...]:
    """Return the devices to lock, sorted, without those that an ancestor holds.

    Args:
        gpus: the visible GPUs and MIG instances; those without a UUID are left out.
        held: names of devices that an ancestor process has locked.
    """
    devices = {Device(device_name(gpu.uuid), device_name(gpu.parent)) for gpu in gpus if gpu.uuid}
    covered = held | {device.name for device in devices}  # a slice comes with its whole GPU
    needed = (one for one in devices if one.name not in held and one.parent not in covered)
    return tuple(sorted(needed, key=lambda one: (one.name, one.parent)))


class Ancestor(NamedTuple):
    """An ancestor of this process and the devices that it holds."""

    pid: int
    start: int | None
    devices: tuple[str, ...]

    def text(self) -> str:
        """Return this as an entry of SAFERUN_LOCKS."""
        return f"{self.pid}:{self.start or 0}:{','.join(self.devices)}"


def ancestors(variable: str) -> list[Ancestor]:
    """Return the entries of SAFERUN_LOCKS that are true: the process lives and is above us."""
    if not variable:
        return []
    above, found = dict(procfs.lineage(os.getpid())), []
    for entry in variable.split(";"):
        pid, _, rest = entry.partition(":")
        start, _, devices = rest.partition(":")
        if pid.isdecimal() and start.isdecimal() and above.get(int(pid[:10])) == int(start[:20]):
            names = tuple(device_name(name) for name in devices.split(",") if name)
            found.append(Ancestor(int(pid), int(start), names))
    return found
