"""Pure: the facts about a machine that the checks judge.

nvidia.py, torchfacts.py, host.py and network.py fill them in. What could not be determined keeps
its default, and no check judges it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict


class CudaDevice(TypedDict, total=False):
    """What peercheck.py prints of a GPU, as far as it came."""

    device: int  # CUDA's number
    name: str
    bus: str
    uuid: str
    memory_mib: int
    capability: str  # "9.0"
    compute_mode: int
    error: str  # why it has no context


class CudaPair(TypedDict, total=False):
    """What it prints of a pair of GPUs, as far as it came."""

    pair: list[int]  # the first one sends to the second
    can: bool  # the one reaches the other's memory
    copy: str  # "ok", or what was wrong with the bytes; the same of the other two ways
    read: str
    write: str
    error: str


@dataclass(frozen=True, slots=True)
class Files:
    """What the NVIDIA driver's files show."""

    version: str = ""  # the kernel module's; "" where it is not loaded (or not shown here)
    gpus: Mapping[str, str] = field(
        default_factory=dict
    )  # product name by PCI address, of every GPU of the host
    nodes: Mapping[str, str] = field(
        default_factory=dict
    )  # device nodes: "ok", "missing" or "closed"
    amd: bool = False  # /dev/kfd, the compute node of AMD's driver
    wsl: bool = False  # /dev/dxg: the driver is Windows' own
    pci: int = 0  # NVIDIA GPUs on the PCI bus that no virtual machine has taken
    manager: bool = False  # a fabric manager runs (in this view of the processes)
    numa: Mapping[str, int] = field(
        default_factory=dict
    )  # the NUMA node of each GPU by its PCI address, where it has one


@dataclass(frozen=True, slots=True)
class Cuda:
    """What the child that uses CUDA's driver library reported (peercheck.py)."""

    asked: bool = False
    missing: str = ""  # why there is no libcuda
    init: str = ""
    status: int = 0
    driver: int = 0  # 13000
    devices: tuple[CudaDevice, ...] = ()
    pairs: tuple[CudaPair, ...] = ()
    hung: tuple[int, int] | None = None  # the pair that was being tried when time was up
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """The user's torch and its surroundings; empty where it could not be asked."""

    launcher: str = ""  # the command that starts torchrun
    trouble: str = ""  # there is no torchrun, or `import torch` fails
    unknown: str = ""  # why torch could not be asked, which says nothing about it
    python: str = ""
    executable: str = ""
    python_h: bool = True  # the interpreter's own headers, which Triton's launchers include
    include: str = ""
    torch: str = ""
    cuda: str | None = None  # it was built with that; None: a CPU or ROCm build
    hip: str | None = None
    archs: tuple[str, ...] = ()  # sm_90, compute_90
    nccl: str | None = None
    triton: str | None = None
    ptxas: str | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory that a job writes to."""

    role: str  # "compile cache"
    path: str
    place: str = ""  # the nearest directory above that exists; the path itself where it does
    trouble: str = ""  # why nothing can be written there; "" where it can
    free: int = -1  # bytes; -1: unknown
    total: int = -1
    inodes_free: int = -1
    inodes: int = 0  # 0: the file system does not count them
    noexec: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory and processors, of the machine and of our control group; bytes, -1: unknown."""

    total: int = -1
    available: int = -1
    limit: int = -1  # the control group's
    used: int = -1  # memory that the control group uses
    shm_total: int = -1
    shm_free: int = -1
    cpus: int = 0  # this process may run on so many
    quota: float = 0.0  # CPUs' worth of time; 0: no limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process; -1: none."""

    files: int = -1
    files_hard: int = -1
    locked: int = -1  # bytes
    processes: int = -1


@dataclass(frozen=True, slots=True)
class Clock:
    """The machine's clock."""

    year: int = 0
    synchronised: bool | None = None  # None: the kernel does not say


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    up: bool = True  # IFF_UP
    carrier: bool = True  # a cable, or what stands for one
    ipv4: str = ""
    ipv6: bool = False  # has an address other than ::1
    speed_mbps: int = -1


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port on which the rendezvous would listen."""

    number: int = 29500
    taken: bool = False
    pid: int | None = None  # None where the holder is somebody else's process
    command: str = ""


@dataclass(frozen=True, slots=True)
class InfiniBand:
    """A port of an RDMA device."""

    device: str  # mlx5_0
    port: str
    state: str  # ACTIVE, DOWN, INIT
    physical: str  # LinkUp, Polling, Disabled
    rate: str  # "400 Gb/sec (4X NDR)"
    layer: str  # InfiniBand, Ethernet


@dataclass(frozen=True, slots=True)
class Network:
    """How other machines are reached."""

    hostname: str = ""
    addresses: tuple[str, ...] = ()  # the host name resolves to them, in this order
    trouble: str = ""  # why it does not
    seconds: float = 0.0  # resolving it took so long
    interfaces: tuple[Interface, ...] = ()  # in getifaddrs' order: by index
    ports: tuple[Port, ...] = ()
    infiniband: tuple[InfiniBand, ...] = ()


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs that compile: paths, "" where there is none."""

    cc: str = ""
    cxx: str = ""
    ptxas: str = ""  # on PATH


@dataclass(frozen=True, slots=True)
class Host:
    """The machine around the GPUs."""

    disks: tuple[Disk, ...] = ()
    memory: Memory = Memory()
    limits: Limits = Limits()
    clock: Clock = Clock()
    tools: Tools = Tools()
    numa: Mapping[int, int] = field(
        default_factory=dict
    )  # NUMA node -> how many of its CPUs this process may use


@dataclass(frozen=True, slots=True)
class Speed:
    """What a GPU was measured to do; 0: not measured."""

    device: int  # CUDA's number
    bus: str  # 0000:18:00.0; "" where torch does not say
    name: str
    matmul_tflops: float = 0.0
    memory_gbs: float = 0.0
    peer_gbs: float = 0.0  # speed to the next GPU
    error: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What `--full` measured."""

    speeds: tuple[Speed, ...] = ()
    trouble: str = ""
    allreduce_gbs: float = 0.0  # NCCL's bus bandwidth over all GPUs; 0: not measured
    allreduce_trouble: str = ""
