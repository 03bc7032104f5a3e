"""Pure: which objects were made in a harmful order.

A false alarm costs more than a missed one: in doubt there is no finding.
"""

from __future__ import annotations

from collections.abc import Collection

_SHARDING = ("num_replicas", "rank", "num_processes", "process_index", "world_size", "num_shards")
_CHOSEN = ("indices", "_indices")  # Subset and similar: the script may have divided the data itself


def samplers(loader: object) -> tuple[object, ...]:
    """Return a loader's samplers, batch samplers and what those wrap; None for a missing one."""
    batches = getattr(loader, "batch_sampler", None)
    inner = (getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None))
    return (getattr(loader, "sampler", None), batches, *inner)


def shards_itself(loader: object) -> bool:
    """Return whether a loader's sampler or dataset knows its rank, or may (IterableDataset)."""
    dataset = getattr(loader, "dataset", None)
    parts = (*samplers(loader), dataset)
    if any(hasattr(part, name) for part in parts for name in _SHARDING):
        return True
    if any(hasattr(dataset, name) for name in _CHOSEN):
        return True
    return any(cls.__name__ == "IterableDataset" for cls in type(dataset).__mro__)


def on_wrong_device(
    backend: str, local_rank: str | None, device_count: int, devices: Collection[str]
) -> bool:
    """Return whether a model is on cuda:0 although its rank has another GPU.

    Args:
        backend: the group's backend, as torch names it ("nccl", "cpu:gloo,cuda:nccl").
        local_rank: the text of LOCAL_RANK, or None.
        device_count: number of visible CUDA devices.
        devices: the devices of the parameters, as text.
    """
    if "nccl" not in backend or not (local_rank or "").isdigit() or int(local_rank or 0) == 0:
        return False
    return device_count > int(local_rank or 0) and set(devices) == {"cuda:0"}


def is_compiled(model: object) -> bool:
    """Return whether a model is a result of `torch.compile(model)`."""
    return type(model).__name__ == "OptimizedModule" and "_dynamo" in type(model).__module__
