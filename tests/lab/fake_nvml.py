"""A fake NVML (fakes/libnvidia-ml.c), and what it answers about GPUs that are well or not.

An answer stands under the name of its function, without nvmlDevice: {"GetMigMode": "1 1"}. Those of
nvmlDeviceGetFieldValues have the field's number: {"value.230": "1"}.
tests/gpu/real/test_doctor_gpu.py compares the fields that a real one gives with nvidia-smi's.
"""

import atexit
import contextlib
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping

from fakecuda import SOURCE, compiled, uuid
from helpers import children
from sandbox import executable, shell

from saferun.doctor.vitals import Files
from saferun.gpu import nvml

MIB = 1 << 20
TOTAL_MIB, RESERVED_MIB = 143771, 620
UNKNOWN = (1 << 64) - 1
WELL = {
    "GetName": "NVIDIA H200",
    "GetPersistenceMode": "1",
    "GetMigMode": "0 0",
    "value.230": "0",
    "GetUtilizationRates": "0 0",
    "GetTemperatureV": "32",
    "GetComputeMode": "0",
    "GetEccMode": "1 1",
    "GetSramEccErrorStatus": " ".join("0" * 12),
    "GetMemoryErrorCounter.1.0.2": "0",
    "GetMemoryErrorCounter.1.1.2": "0",
    "GetRepairStatus": "0 0",
    "GetRemappedRows": "0 0 0 0",
    "GetClockInfo": "1980",
    "GetMaxClockInfo": "1980",
    "GetCurrentClocksEventReasons": "1",
    "value.270": "0",
    "value.271": "0",
    "value.186": "76100",
    "GetEnforcedPowerLimit": "700000",
    "GetMaxPcieLinkWidth": "16",
    "GetCurrPcieLinkWidth": "16",
    "GetGpuFabricInfoV": "3 0 3 1",
    "GetCudaComputeCapability": "9 0",
    "GetNvLinkState": "1 1",
}


def bus(number: int) -> str:
    """Return the PCI address of a GPU, as /sys writes it."""
    return f"0000:{0x1A + number:02x}:00.0"


def gpu(number: int = 0, holders: Iterable[int] = (), used: int = 3, **changed: str) -> dict:
    """Return the answers about a GPU.

    Args:
        number: its number.
        holders: pids that have 70,000 MiB of it each.
        used: MiB.
        changed: answers that differ.
    """
    free = TOTAL_MIB - RESERVED_MIB - used
    sizes = (TOTAL_MIB, RESERVED_MIB, free, used)
    return {
        **WELL,
        "GetUUID": uuid(number),
        "GetPciInfo_v3": f"0000{bus(number).upper()}",
        "GetMemoryInfo_v2": " ".join(str(size * MIB) for size in sizes),
        "GetComputeRunningProcesses_v3": " ".join(f"{pid} {70000 * MIB}" for pid in holders),
        **changed,
    }


@functools.cache
def _library() -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="saferun-test-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return compiled(folder, SOURCE.with_name("libnvidia-ml.c"), nvml.LIBRARY) / nvml.LIBRARY


class Nvml:
    """A directory with an NVML and its answers, for LD_LIBRARY_PATH."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / nvml.LIBRARY).symlink_to(_library())

    def reports(self, *gpus: Mapping[str, str], look: int | None = None, **general: str) -> None:
        """Answer so about these GPUs.

        Args:
            gpus: the answers of each.
            look: the number of the process that gets these answers, from 0; None: all others.
            general: answers that are about no GPU: Init_v2="hang".
        """
        known = {"driver": "580.95.05", "cuda": "13000", "GetCount_v2": str(len(gpus)), **general}
        lines = [f"* {name} {answer}\n" for name, answer in known.items()]
        for number, answers in enumerate(gpus):
            peers = {f"GetP2PStatus.{other}.0": "0" for other in range(len(gpus))}
            lines += [f"{number} {name} {text}\n" for name, text in {**peers, **answers}.items()]
        path = self.folder / ("answers" if look is None else f"answers.{look}")
        path.with_suffix(".new").write_text("".join(lines), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    @property
    def asked(self) -> int:
        """Return how many processes have asked it."""
        path = self.folder / "asked"
        return path.stat().st_size if path.exists() else 0


def asking(parent: int) -> list[int]:
    """Return the children of a process that ask NVML."""
    found = []
    for pid in children(parent):
        with contextlib.suppress(OSError):  # it has just ended
            if b"ask_nvml" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def listing(folder: pathlib.Path, count: int, script: str = "") -> None:
    """Write an nvidia-smi that lists so many GPUs, or does what a script says."""
    lines = [f"GPU {n}: NVIDIA H200 (UUID: {uuid(n)})" for n in range(count)]
    (folder / "list.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    executable(folder / "nvidia-smi", f"#!/bin/sh\n{script or shell('cat', folder / 'list.txt')}\n")


FILES = Files(
    version="580.95.05",
    gpus={bus(0): "NVIDIA H200", bus(1): "NVIDIA H200"},
    nodes=dict.fromkeys(("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"), "ok"),
    manager=True,
)


def answer(count: int, **changed) -> nvml.NvmlAnswer:
    """Return what NVML says of so many GPUs that are well, in short."""
    cards = tuple(
        nvml.Card(bus(n), {"Product Name": "NVIDIA H200", "GPU UUID": uuid(n)}, (), n)
        for n in range(count)
    )
    return nvml.NvmlAnswer(nvml.LIBRARY, nvml.NvmlReport("580.95.05", "13.0", cards), **changed)
