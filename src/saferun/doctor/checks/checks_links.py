"""Pure: the links between GPUs: the driver's report, verified transfers, NVLink and RDMA.

A card can report peer access and silently corrupt the transferred data: the copy engine on RTX 6000
Ada (https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257), kernels on a 4090
(https://github.com/aikitoria/open-gpu-kernel-modules/issues/8). So every pair is tested with known
bytes, by each method and in both directions (peercheck.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from saferun.doctor.vitals import Cuda, CudaPair, InfiniBand, Limits
from saferun.gpu.nvml import NvmlAnswer, bus_id
from saferun.model import NOTE, OK, PROBLEM, Finding

TROUBLE_DOC = (
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
    "#gpu-direct-communication"
)
_NO_ACCESS = {  # the legend of `nvidia-smi topo -p2p r`
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "U": "unknown",
}
_WAYS = {"copy": "the copy engine", "read": "kernels that read", "write": "kernels that write"}
_FIX = "export NCCL_P2P_DISABLE=1 (slower, correct); switch ACS and the IOMMU off in the BIOS"


def peers(nvml: NvmlAnswer, cuda: Cuda) -> Iterator[Finding]:
    """Check that each pair of GPUs can access each other's memory with the right bytes."""
    wrong = [pair for pair in cuda.pairs if _wrong(pair)]
    for pair in wrong:
        ways = ", ".join(f"{_WAYS[way]}: {found}" for way, found in _wrong(pair).items())
        what = "data sent between them arrives corrupted"
        if "copy" in _wrong(pair) and not pair.get("can"):
            what += ", through host memory too"
        yield Finding(
            PROBLEM, _names(nvml, cuda, pair["pair"]), what, f"{ways} <{TROUBLE_DOC}>", _FIX
        )
    if cuda.hung:
        what = "a transfer between them does not end"
        yield Finding(PROBLEM, _names(nvml, cuda, cuda.hung), what, f"<{TROUBLE_DOC}>", _FIX)
    yield from _untried(nvml, cuda)
    yield from _without(nvml, cuda)
    if cuda.pairs and not wrong and not cuda.hung:
        tried = [pair for pair in cuda.pairs if "copy" in pair]
        direct = sum(bool(pair.get("can")) for pair in tried)
        what = f"{len(tried)} transfers between GPUs checked, all right ({direct} of them direct)"
        yield Finding(OK if tried else NOTE, "peer to peer", what)


def _wrong(pair: CudaPair) -> dict[str, object]:
    """Return the methods by which wrong bytes arrive, and what is wrong with the bytes."""
    found: Mapping[str, object] = pair
    return {way: found[way] for way in _WAYS if str(found.get(way, "ok")) != "ok"}


def _names(nvml: NvmlAnswer, cuda: Cuda, pair: Sequence[int]) -> str:
    return f"GPU {_number(nvml, cuda, pair[0])} to {_number(nvml, cuda, pair[1])}"


def _number(nvml: NvmlAnswer, cuda: Cuda, place: int) -> int:
    """Return NVML's number of a GPU; CUDA counts only the visible GPUs, in its own order."""
    buses = {device["device"]: device.get("bus", "") for device in cuda.devices}
    bus = bus_id(buses[place]) if buses.get(place) else ""
    return nvml.report.numbers().get(bus, place)


def _untried(nvml: NvmlAnswer, cuda: Cuda) -> Iterator[Finding]:
    """Yield GPUs without a context, and pairs whose calls failed."""
    broken = [device for device in cuda.devices if "error" in device]
    for device in broken:
        what = f"no transfer could be tried: {device['error']}"
        area = f"GPU {_number(nvml, cuda, device['device'])}"
        yield Finding(NOTE, area, what, "", "free its memory and try again")
    failed: dict[str, list[CudaPair]] = {}
    for pair in cuda.pairs:
        if "error" in pair:
            failed.setdefault(pair["error"], []).append(pair)
    for error, pairs in failed.items():
        detail = "; ".join(_names(nvml, cuda, pair["pair"]) for pair in pairs[:6])
        what = f"{len(pairs)} transfers between GPUs failed: {error}"
        yield Finding(PROBLEM, "peer to peer", what, detail, _FIX)


def _without(nvml: NvmlAnswer, cuda: Cuda) -> Iterator[Finding]:
    """Yield the number of pairs without direct access: NCCL uses host memory for them."""
    no = [pair for pair in cuda.pairs if pair.get("can") is False]
    codes = Counter(code for code in nvml.peers.values() if code != "OK")
    reasons = ", ".join(f"{_NO_ACCESS.get(code, code)} ({n} pairs)" for code, n in codes.items())
    total = len(cuda.pairs) or len(nvml.peers)
    count = len(no) if cuda.pairs else sum(codes.values())
    if count:
        what = f"{count} of {total} directions have no direct access: NCCL uses host memory"
        detail = f"the driver says: {reasons}" if reasons else ""
        yield Finding(NOTE, "peer to peer", what, detail)


def nvlinks(nvml: NvmlAnswer) -> Iterator[Finding]:
    """Check that every GPU has as many active NVLinks as the others."""
    links = {gpu: found for gpu, found in nvml.links.items() if found[1]}
    if len(links) < 2:
        return
    most = max(up for up, _ in links.values())
    if not most:
        yield Finding(NOTE, "NVLink", "no link is up on any GPU", "", "check the bridges")
        return
    for gpu, (up, known) in links.items():
        if up < most:
            what = f"{up} of {known} NVLinks are up, the others have {most}"
            fix = "reset all GPUs together or reboot; if it comes back, a link is broken"
            yield Finding(PROBLEM, f"GPU {gpu}", what, "", fix)
    if all(up == most for up, _ in links.values()):
        yield Finding(OK, "NVLink", f"{most} links up on each of {len(links)} GPUs")


def infiniband(ports: Iterable[InfiniBand], limits: Limits, disabled: bool) -> Iterator[Finding]:
    """Check the RDMA ports: NCCL uses every active one.

    Args:
        ports: the ports of all devices.
        limits: this process's limits; registered memory must be locked.
        disabled: whether NCCL_IB_DISABLE=1 is set.
    """
    found = list(ports)
    if not found:
        return
    for port in found:
        name = f"{port.device} port {port.port}"
        if port.state != "ACTIVE" and port.physical != "Disabled":
            what = f"{name} is {port.state} ({port.physical})"
            level = NOTE if port.layer == "Ethernet" or port.physical == "Polling" else PROBLEM
            yield Finding(level, "RDMA", what, port.layer, "cable, switch or subnet manager")
    active = [port for port in found if port.state == "ACTIVE"]
    yield from _uneven(active)
    if active and limits.locked >= 0:
        what = f"RDMA needs locked memory, and the limit is {limits.locked >> 10} KiB"
        fix = "`ulimit -l unlimited`; docker run --ulimit memlock=-1"
        yield Finding(PROBLEM, "RDMA", what, "NCCL fails with `ibv_reg_mr` and ENOMEM", fix)
    if active and disabled:
        what = "NCCL_IB_DISABLE=1 leaves active RDMA ports unused"
        yield Finding(NOTE, "RDMA", what, "", "unset it where the ports work")
    if active:
        rates = Counter((port.rate, port.layer) for port in active)
        text = ", ".join(f"{n} x {rate} {layer}" for (rate, layer), n in rates.items())
        yield Finding(OK, "RDMA", f"active: {text}")


def _uneven(active: Sequence[InfiniBand]) -> Iterator[Finding]:
    """Yield ports that run at a lower rate than the others of their kind."""
    best: dict[str, float] = {}
    for port in active:
        best[port.layer] = max(best.get(port.layer, 0.0), _gigabits(port.rate))
    compute = [p for p in active if p.layer == "InfiniBand"]
    for port in compute:
        if _gigabits(port.rate) < best[port.layer]:
            what = f"{port.device} port {port.port} runs at {port.rate}, others are faster"
            yield Finding(NOTE, "RDMA", what, "", "check the cable and the switch port")


def _gigabits(rate: str) -> float:
    try:
        return float(rate.split()[0])
    except (ValueError, IndexError):
        return 0.0
