"""Pure: the facts about a machine that the checks judge.

nvidia.py, torchfacts.py, host.py and network.py fill them in. Unknown facts keep their defaults,
and no check judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict


class CudaDevice(TypedDict, total=False):
    """peercheck.py's output on a GPU, as far as it came."""

    device: int  # CUDA's number
    name: str
    bus: str
    uuid: str
    memory_mib: int
    capability: str  # "9.0"
    compute_mode: int
    error: str  # reason why it has no context


class CudaPair(TypedDict, total=False):
    """peercheck.py's output on a pair of GPUs, as far as it came."""

    pair: list[int]  # the first one sends to the second
    can: bool  # the first can access the other's memory
    copy: str  # "ok", or what was wrong with the bytes; likewise for the other two methods
    read: str
    write: str
    error: str


@dataclass(frozen=True, slots=True)
class Files:
    """The content of the NVIDIA driver's files."""

    version: str = ""  # the kernel module's; "" where it is not loaded (or not shown here)
    # Product name by PCI address, of every GPU of the host.
    gpus: Mapping[str, str] = field(default_factory=dict)
    # Device nodes: "ok", "missing" or "closed".
    nodes: Mapping[str, str] = field(default_factory=dict)
    amd: bool = False  # /dev/kfd, the compute node of AMD's driver
    wsl: bool = False  # /dev/dxg: the driver is Windows' own
    pci: int = 0  # NVIDIA GPUs on the PCI bus that no virtual machine has taken
    manager: bool = False  # a fabric manager runs (in this view of the processes)
    # The NUMA node of each GPU by its PCI address, where it has one.
    numa: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cuda:
    """The report of the child that uses CUDA's driver library (peercheck.py)."""

    asked: bool = False
    missing: str = ""  # the reason why there is no libcuda
    init: str = ""
    status: int = 0
    driver: int = 0  # 13000
    devices: tuple[CudaDevice, ...] = ()
    pairs: tuple[CudaPair, ...] = ()
    hung: tuple[int, int] | None = None  # the pair that was being tested when time was up
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """The user's torch and its surroundings; empty if it could not be examined."""

    launcher: str = ""  # the command that starts torchrun
    trouble: str = ""  # no torchrun, or `import torch` fails
    unknown: str = ""  # reason why torch could not be examined; it proves nothing
    python: str = ""
    executable: str = ""
    python_h: bool = True  # the interpreter's headers, which Triton's launchers include
    include: str = ""
    torch: str = ""
    cuda: str | None = None  # the CUDA that it was built with; None: a CPU or ROCm build
    hip: str | None = None
    archs: tuple[str, ...] = ()  # sm_90, compute_90
    nccl: str | None = None
    triton: str | None = None
    ptxas: str | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory to which a job writes."""

    role: str  # "compile cache"
    path: str
    place: str = ""  # the nearest existing parent, or the path itself if it exists
    trouble: str = ""  # the reason why nothing can be written there; "" if it can
    free: int = -1  # bytes; -1: unknown
    total: int = -1
    inodes_free: int = -1
    inodes: int = 0  # 0: the file system does not count them
    noexec: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory and processors of the machine and of our control group; bytes, -1: unknown."""

    total: int = -1
    available: int = -1
    limit: int = -1  # the control group's limit
    used: int = -1  # memory that the control group uses
    shm_total: int = -1
    shm_free: int = -1
    cpus: int = 0  # number of CPUs on which this process may run
    quota: float = 0.0  # in CPUs; 0: no limit


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
    carrier: bool = True  # a cable or its equivalent is connected
    ipv4: str = ""
    ipv6: bool = False  # has an address other than ::1
    speed_mbps: int = -1


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port on which the rendezvous would listen."""

    number: int = 29500
    taken: bool = False
    pid: int | None = None  # None if another user's process holds it
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
    """The network to other machines."""

    hostname: str = ""
    addresses: tuple[str, ...] = ()  # addresses of the host name, in order
    trouble: str = ""  # reason why it does not resolve
    seconds: float = 0.0  # time to resolve it
    interfaces: tuple[Interface, ...] = ()  # in the order of getifaddrs: by index
    ports: tuple[Port, ...] = ()
    infiniband: tuple[InfiniBand, ...] = ()


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of compilers, "" for a missing one."""

    cc: str = ""
    cxx: str = ""
    ptxas: str = ""  # from PATH


@dataclass(frozen=True, slots=True)
class Host:
    """The machine around the GPUs."""

    disks: tuple[Disk, ...] = ()
    memory: Memory = Memory()
    limits: Limits = Limits()
    clock: Clock = Clock()
    tools: Tools = Tools()
    # NUMA node -> how many of its CPUs this process may use.
    numa: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of a GPU; 0: not measured."""

    device: int  # CUDA's number
    bus: str  # 0000:18:00.0; "" if torch does not tell
    name: str
    matmul_tflops: float = 0.0
    memory_gbs: float = 0.0
    peer_gbs: float = 0.0  # transfer speed to the next GPU
    error: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of `--full`."""

    speeds: tuple[Speed, ...] = ()
    trouble: str = ""
    allreduce_gbs: float = 0.0  # NCCL's bus bandwidth over all GPUs; 0: not measured
    allreduce_trouble: str = ""
