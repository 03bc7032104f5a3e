"""Names of GPUs and MIG slices in lock files, in SAFERUN_LOCKS and in CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from saferun.model import Gpu
from saferun.system import procfs

SHORT_UUID = len("GPU-00000000")
VARIABLE = "SAFERUN_LOCKS"  # devices that ancestors hold: "<pid>:<start>:<device>,<device>;…"


class Device(NamedTuple):
    """A GPU or a MIG slice, by its name in file names."""

    name: str
    parent: str = ""  # the GPU of a slice


def device_name(uuid: str) -> str:
    """Return the spelling of a UUID in file names: no separators, hexadecimal in lower case.

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
    """Return the devices to lock, sorted, except those that an ancestor holds.

    Args:
        gpus: the visible GPUs and MIG instances; GPUs without a UUID are left out.
        held: names of devices that an ancestor process has locked.
    """
    devices = {Device(device_name(gpu.uuid), device_name(gpu.parent)) for gpu in gpus if gpu.uuid}
    covered = held | {device.name for device in devices}  # a whole GPU includes its slices
    needed = (one for one in devices if one.name not in held and one.parent not in covered)
    return tuple(sorted(needed, key=lambda one: (one.name, one.parent)))


class Ancestor(NamedTuple):
    """An ancestor of this process, and the devices that it holds."""

    pid: int
    start: int | None
    devices: tuple[str, ...]

    def text(self) -> str:
        """Return this as an entry of SAFERUN_LOCKS."""
        return f"{self.pid}:{self.start or 0}:{','.join(self.devices)}"


def ancestors(variable: str) -> list[Ancestor]:
    """Return the valid entries of SAFERUN_LOCKS: the process lives and is our ancestor."""
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


# CUDA_VISIBLE_DEVICES


def visible_without(visible: object, devices: Sequence[tuple[str, bool]]) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES without the bad GPUs, in the same order.

    Exported items keep their form. Otherwise UUIDs are used, which do not depend on
    CUDA_DEVICE_ORDER; CUDA accepts the beginning of a UUID.

    Args:
        visible: the job's value of the variable; None if it is not set.
        devices: UUID and whether it is good, in CUDA's order.

    Returns:
        None if no GPU would be left, or if no value can express it.

    >>> visible_without("2, 5,7", [("", True), ("", False), ("", True)])
    '2,7'
    """
    good = [number for number, (_, well) in enumerate(devices) if well]
    if not good:
        return None
    if isinstance(visible, str):
        entries = visible.split(",")
        if len(entries) < len(devices):
            return None
        return ",".join(entries[number].strip() for number in good)
    uuids = [uuid for uuid, _ in devices]
    if any(uuid.startswith("MIG-") for uuid in uuids):
        return None  # CUDA shows only one instance at a time
    if not all(uuids):
        return ",".join(map(str, good))
    return ",".join(_short(uuids[number], uuids) for number in good)


def _short(uuid: str, uuids: Sequence[str]) -> str:
    lengths = range(SHORT_UUID, len(uuid))
    own = (uuid[:n] for n in lengths if sum(u.startswith(uuid[:n]) for u in uuids) == 1)
    return next(own, uuid)
