"""The value of CUDA_VISIBLE_DEVICES that leaves bad GPUs out."""

from __future__ import annotations

from collections.abc import Sequence

SHORT_UUID = len("GPU-00000000")


def visible_without(visible: object, devices: Sequence[tuple[str, bool]]) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES that leaves the bad GPUs out, in the same order.

    What was exported keeps its words. Else UUIDs are used, which mean the same GPU whatever
    CUDA_DEVICE_ORDER says; CUDA takes their beginning.

    Args:
        visible: the variable as the job has it; None where it is not set.
        devices: UUID, and whether it is good, as CUDA counts.

    Returns:
        None where no GPU would be left, or where one value cannot say it.

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
        return None  # CUDA shows one instance at a time
    if not all(uuids):
        return ",".join(map(str, good))
    return ",".join(_short(uuids[number], uuids) for number in good)


def _short(uuid: str, uuids: Sequence[str]) -> str:
    lengths = range(SHORT_UUID, len(uuid))
    own = (uuid[:n] for n in lengths if sum(u.startswith(uuid[:n]) for u in uuids) == 1)
    return next(own, uuid)
