"""Pure: which GPUs are slower than their siblings.

A collective waits for the slowest GPU, so one slow GPU slows all. Siblings are GPUs with the same
name; no data sheet is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from saferun.doctor.vitals import Measured, Speed
from saferun.model import NOTE, OK, PROBLEM, Finding

SLOWER = 0.10  # a GPU this far below its siblings' median is slow
_METRICS = {  # field -> meaning, unit
    "matmul_tflops": ("matmul", "TFLOP/s (float16)"),
    "memory_gbs": ("memory", "GB/s"),
    "peer_gbs": ("to the next GPU", "GB/s"),
}


def judge(measured: Measured, numbers: Mapping[str, int], linked: bool) -> Iterator[Finding]:
    """Yield the slow GPUs, and the measurements.

    Args:
        measured: the measurements of `--full`.
        numbers: nvidia-smi's numbers of the GPUs, by PCI address.
        linked: NVLink is up, so all links between GPUs are equal; over PCI Express they depend on
            the slots.
    """
    if measured.trouble:
        fix = "end what runs on the GPUs, and try again"
        yield Finding(PROBLEM, "speed", f"could not be measured: {measured.trouble}", "", fix)
    for speed in measured.speeds:
        if speed.error:
            yield Finding(PROBLEM, _area(speed, numbers), f"failed: {speed.error}")
    for name in sorted({speed.name for speed in measured.speeds if speed.name}):
        siblings = [speed for speed in measured.speeds if speed.name == name]
        for metric in _METRICS:
            yield from _compare(siblings, metric, numbers, linked)
    yield from _allreduce(measured)


def _area(speed: Speed, numbers: Mapping[str, int]) -> str:
    return f"GPU {numbers.get(speed.bus, speed.device)}"


def _compare(
    siblings: list[Speed], metric: str, numbers: Mapping[str, int], linked: bool
) -> Iterator[Finding]:
    values = {_area(s, numbers): float(getattr(s, metric)) for s in siblings}
    values = {area: value for area, value in values.items() if value}
    if not values:
        return
    metric_name, unit = _METRICS[metric]
    others = {area: _of_others(area, values) for area in values}
    slow = [area for area in values if values[area] < (1 - SLOWER) * others[area]]
    level = NOTE if metric == "peer_gbs" and not linked else PROBLEM
    for area in slow:
        below = 100 * (1 - values[area] / others[area])
        what = f"{metric_name}: {values[area]:.0f} {unit}, {below:.0f} % below the others"
        fix = "check heat, power limit, other jobs on it and the PCI slot; else have it replaced"
        yield Finding(level, area, what, f"their median is {others[area]:.0f}", fix)
    if not slow:
        yield Finding(OK, "speed", f"{metric_name}: {_span(list(values.values()))} {unit}")


def _of_others(area: str, values: Mapping[str, float]) -> float:
    """Return the median of a GPU's siblings; the GPU's own value if it has none."""
    return median([value for name, value in values.items() if name != area] or [values[area]])


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _allreduce(measured: Measured) -> Iterator[Finding]:
    if measured.allreduce_trouble:
        what = f"NCCL all-reduce over all GPUs failed: {measured.allreduce_trouble}"
        fix = "NCCL_DEBUG=INFO shows more; NCCL_P2P_DISABLE=1 avoids peer-to-peer transfers"
        yield Finding(PROBLEM, "speed", what, "", fix)
    elif measured.allreduce_gbs:
        what = f"NCCL all-reduce over all GPUs: {measured.allreduce_gbs:.0f} GB/s (bus bandwidth)"
        yield Finding(OK, "speed", what)
