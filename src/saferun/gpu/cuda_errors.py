"""Pure: what the CUDA driver's errors mean at a job's start, and what fixes them.

Numbers and names are those of CUresult,
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html, which also says what each
means; where a fix stands written elsewhere, its source is beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from saferun.named_tuple import NamedTuple

TYPES = "https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"
_FABRIC = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html"
_COMPATIBLE = "https://docs.nvidia.com/deploy/cuda-compatibility/index.html"
_SMI = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"
_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_MEMORY = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
_MIG = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/index.html"
_MPS = "https://docs.nvidia.com/deploy/mps/index.html"
_UVM = "https://github.com/pytorch/pytorch/issues/49081"

# What recovery can do about an error, least invasive first (recovery.py).
DRAIN = "drain"  # memory that a process has left is on its way back
LEFTOVERS = "leftovers"  # an ended run of ours may have left processes
RESET = "reset"  # the GPU does not come back by itself
# What is tried after a failure of these kinds (failures.yaml), before a next attempt or at the
# end. A failure names no GPU, so that a reset is then the driver's wish alone.
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
    """An error that is known here."""

    name: str
    means: str
    fix: str
    source: str = TYPES
    asks: tuple[str, ...] = ()  # for recovery


_RESET_FIX = (
    "end what runs on this GPU, then reset it as root (`nvidia-smi --gpu-reset -i UUID`) or reboot"
    ", and look for Xid lines in dmesg"
)

ERRORS: Mapping[int, Known] = {
    1: Known("CUDA_ERROR_INVALID_VALUE", "the driver refused an ordinary call", _RESET_FIX, _XID),
    2: Known(
        "CUDA_ERROR_OUT_OF_MEMORY",
        "not even a context and 64 MiB fit into this GPU's memory",
        "end what holds it (nvidia-smi shows the processes), or wait until it is given back",
        asks=(LEFTOVERS, DRAIN),
    ),
    3: Known(
        "CUDA_ERROR_NOT_INITIALIZED",
        "the driver could not be initialised",
        "look for the reason in dmesg; restart the machine if nvidia-smi fails, too",
        _XID,
    ),
    34: Known(
        "CUDA_ERROR_STUB_LIBRARY",
        "the libcuda.so.1 that was found is the toolkit's stub for linking, not a driver",
        "take the directory `stubs` out of LD_LIBRARY_PATH",
    ),
    46: Known(
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "another process holds the GPU exclusively, or it is prohibited, or its memory is full",
        "nvidia-smi shows who holds it; `nvidia-smi -c 0` (as root) ends an exclusive mode",
        asks=(LEFTOVERS, DRAIN),
    ),
    100: Known(
        "CUDA_ERROR_NO_DEVICE",
        "CUDA shows no GPU",
        "look at nvidia-smi -L and CUDA_VISIBLE_DEVICES; a container must be given its GPUs "
        "(docker run --gpus all)",
    ),
    101: Known(
        "CUDA_ERROR_INVALID_DEVICE",
        "a GPU that was asked for is not there, or cannot be used as it is set up",
        "compare CUDA_VISIBLE_DEVICES with nvidia-smi -L; a GPU in MIG mode needs an instance "
        "(`nvidia-smi mig -lgi`)",
        _MIG,
    ),
    102: Known(
        "CUDA_ERROR_DEVICE_NOT_LICENSED",
        "the virtual GPU has no licence",
        "start nvidia-gridd and look at its log",
    ),
    200: Known("CUDA_ERROR_INVALID_IMAGE", "the driver refused its own code", _RESET_FIX, _XID),
    201: Known(
        "CUDA_ERROR_INVALID_CONTEXT",
        "the context was gone between two calls",
        _RESET_FIX,
        _XID,
        asks=(RESET,),
    ),
    209: Known(
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "the driver does not know this GPU",
        "install a driver that is new enough for it",
        _COMPATIBLE,
    ),
    214: Known(
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "the GPU's memory has an error that it cannot correct",
        _RESET_FIX + "; have it replaced if the error returns (`nvidia-smi -q -d ECC`)",
        _MEMORY,
        asks=(RESET,),
    ),
    220: Known(
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "the NVLink connection had an error that it cannot correct",
        _RESET_FIX + "; `nvidia-smi nvlink -e` shows the links' errors",
        _XID,
        asks=(RESET,),
    ),
    226: Known(
        "CUDA_ERROR_CONTAINED",
        "the GPU's memory had an error that the driver contained to this process",
        "start again; look at `nvidia-smi -q -d ECC` if it returns",
        _MEMORY,
    ),
    304: Known(
        "CUDA_ERROR_OPERATING_SYSTEM",
        "a call of the operating system failed",
        "look at the modes of /dev/nvidia*, at the control group's devices and at ulimit -v",
    ),
    500: Known(
        "CUDA_ERROR_NOT_FOUND",
        "the driver's library lacks a function that is older than every supported torch",
        "put the driver's own libcuda.so.1 first: look at LD_LIBRARY_PATH and at the driver's "
        "version",
        _COMPATIBLE,
    ),
    700: Known(
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "the GPU touched an address that is not its own, in code that cannot be wrong",
        _RESET_FIX,
        _XID,
        asks=(RESET,),
    ),
    702: Known(
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "the GPU took longer than the driver allows",
        "another process or a display keeps it busy; nvidia-smi shows who",
    ),
    719: Known(
        "CUDA_ERROR_LAUNCH_FAILED",
        "the GPU stopped in the middle of its work",
        _RESET_FIX,
        _XID,
        asks=(RESET,),
    ),
    800: Known(
        "CUDA_ERROR_NOT_PERMITTED",
        "this process may not use the GPU",
        "look at the modes of /dev/nvidia* and at the control group's devices",
    ),
    801: Known(
        "CUDA_ERROR_NOT_SUPPORTED",
        "the driver cannot do this on this system",
        "look at nvidia-smi and dmesg; under a hypervisor at how the GPU is passed through",
    ),
    802: Known(
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "the NVSwitch fabric of these GPUs is not set up",
        "start the fabric manager, of exactly the driver's version (`systemctl status "
        "nvidia-fabricmanager`), and wait until nvidia-smi -q says Fabric State: Completed",
        _FABRIC,
    ),
    803: Known(
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "libcuda and the loaded kernel module are of different driver versions",
        "reboot after a driver update; in a container use the host's libcuda, and leave "
        "/usr/local/cuda/compat out of LD_LIBRARY_PATH",
        _COMPATIBLE,
    ),
    804: Known(
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "a forward-compatibility libcuda is in use, and this GPU does not support that",
        "leave /usr/local/cuda/compat out of LD_LIBRARY_PATH, or update the driver",
        _COMPATIBLE,
    ),
    805: Known(
        "CUDA_ERROR_MPS_CONNECTION_FAILED",
        "the MPS daemon does not answer",
        "start nvidia-cuda-mps-control -d, or unset CUDA_MPS_PIPE_DIRECTORY",
        _MPS,
    ),
    807: Known(
        "CUDA_ERROR_MPS_SERVER_NOT_READY",
        "the MPS server is starting or recovering from a fault",
        "wait, or restart the daemon (echo quit | nvidia-cuda-mps-control)",
        _MPS,
    ),
    999: Known(
        "CUDA_ERROR_UNKNOWN",
        "the driver does not say why; mostly its memory module is missing or stuck",
        "reload it as root while nothing uses a GPU (modprobe -r nvidia_uvm && modprobe "
        "nvidia_uvm), or reboot",
        _UVM,
        asks=(RESET,),
    ),
}

_UNKNOWN = Known("", "", "look for Xid lines in dmesg and at nvidia-smi; restart the machine", _XID)


def known(code: int) -> Known:
    """Return what is known of an error; general advice where it is not."""
    return ERRORS.get(code, _UNKNOWN)


def title(code: int, name: str) -> str:
    """Return how people are told of an error: its name and its number.

    >>> title(802, ""), title(12345, "")
    ('CUDA_ERROR_SYSTEM_NOT_READY (802)', 'CUDA error 12345')
    """
    name = name or known(code).name
    return f"{name} ({code})" if name else f"CUDA error {code}"


def node_fix(nodes: Mapping[str, str]) -> str:
    """Return the fix for device nodes that are missing or closed to us; "" where none is."""
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
