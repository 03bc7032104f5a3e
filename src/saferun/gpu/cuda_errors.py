"""What the CUDA driver's errors at a job's start mean, and their fixes: cuda_errors.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from saferun.knowledge import loader

# The steps by which recovery can fix an error, the least invasive first (recovery.py).
DRAIN = "drain"  # memory that a process has left is about to be freed
LEFTOVERS = "leftovers"  # an ended saferun run may have left processes
RESET = "reset"  # the GPU does not recover by itself
# Steps after a failure of these kinds (failures.yaml), before the next attempt or at the end. A
# failure names no GPU, so a reset is made only if the driver asks for it.
AFTER: Mapping[str, frozenset[str]] = {
    "cuda-oom-other-process": frozenset({LEFTOVERS, DRAIN}),
    "cuda-oom-despite-free": frozenset({LEFTOVERS, DRAIN}),
    "cuda-devices-busy": frozenset({LEFTOVERS, DRAIN}),
    "cuda-launch-failure": frozenset({RESET}),
    "cuda-illegal-access-sporadic": frozenset({RESET}),
    "gpu-ecc-uncorrectable": frozenset({RESET}),
    "gpu-lost": frozenset({RESET}),
    "gpu-link-failed": frozenset({RESET}),
    "cuda-init-unknown-error": frozenset({RESET}),
}


class Known(NamedTuple):
    """The knowledge about an error."""

    fix: str
    source: str
    name: str = ""
    means: str = ""
    asks: tuple[str, ...] = ()  # steps of recovery that may fix it


def known(code: int) -> Known:
    """Return the knowledge about an error; general advice if it is unknown."""
    document = loader.load("cuda_errors.yaml")
    row = next((row for row in document["errors"] if row["code"] == code), document["unknown"])
    return Known(
        row["fix"].format(reset=document["reset"]),
        row.get("source", document["source"]),
        row.get("name", ""),
        row.get("means", ""),
        tuple(row.get("asks", ())),
    )


def title(code: int, name: str) -> str:
    """Return the text for an error: its name and its number.

    >>> title(802, ""), title(12345, "")
    ('CUDA_ERROR_SYSTEM_NOT_READY (802)', 'CUDA error 12345')
    """
    name = name or known(code).name
    return f"{name} ({code})" if name else f"CUDA error {code}"


def node_fix(nodes: Mapping[str, str]) -> str:
    """Return the fix for device nodes that are missing or closed to us; "" if there are none."""
    if nodes.get("/dev/nvidia-uvm") == "missing":
        return (
            "/dev/nvidia-uvm is missing: run `nvidia-modprobe -u -c=0` as root; a container must "
            "be given the node, too"
        )
    if nodes.get("/dev/nvidiactl") == "missing":
        return "/dev/nvidiactl is missing: the container was given no GPU (docker run --gpus all)"
    closed = [path for path, trouble in nodes.items() if trouble == "closed"]
    if closed:
        whose = "the node's mode and the control group's devices"
        return f"this user may not open {' and '.join(closed)}: look at {whose}"
    return ""
