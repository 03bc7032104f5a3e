"""The GPUs that the job will see, found without torch and without a CUDA context.

The driver's files in /proc are read first (under a millisecond). Only if they are missing or leave
a doubt, `nvidia-smi -L` is run, for a limited time, since it hangs on a failing GPU. CUDA's
interpretation of CUDA_VISIBLE_DEVICES was measured on driver 580 (H200), entry by entry, and agrees
with https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html;
MIG follows https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html.
NVIDIA_VISIBLE_DEVICES is for the container runtime: neither CUDA nor saferun reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from saferun.base import proc as procfiles  # `proc` is a place here
from saferun.model import Gpu, GpuFacts
from saferun.system import command, paths
from saferun.system.printable import printable

HIDE_ALL = ("", "-1", "NoDevFiles")  # deliberate values; Slurm writes NoDevFiles for "no GPU here"
UUID_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")


def driver_version(proc: str = "/proc/driver/nvidia") -> str:
    """Return the version of NVIDIA's kernel driver, such as "580.65.06"; "" without a driver."""
    line = procfiles.text(f"{proc}/version").partition("\n")[0]
    found = re.search(r"\b\d{3,4}\.\d{1,3}(?:\.\d{1,3})?\b", line)
    return found[0] if found else ""


def addresses(proc: str = "/proc/driver/nvidia") -> dict[str, str]:
    """Return the PCI address of each GPU by its UUID, from the driver's files."""
    return {uuid: bus for bus, uuid, _ in _in_use(proc)}


def minors(proc: str = "/proc/driver/nvidia") -> dict[str, int]:
    """Return the number of each GPU's device node by its UUID, from the driver's files."""
    return {uuid: int(minor) for _, uuid, minor in _in_use(proc) if minor.isdecimal()}


def _in_use(proc: str) -> Iterator[tuple[str, str, str]]:
    """Yield address, UUID and minor number of each GPU with a UUID, so that has been used once."""
    for bus, fields in information(proc):
        uuid = fields.get("GPU UUID", "")
        if uuid and "?" not in uuid:
            yield bus, uuid, fields.get("Device Minor", "")


def information(proc: str = "/proc/driver/nvidia") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the PCI address and the file content of each GPU of the host, in bus order."""
    for bus in sorted(procfiles.names(f"{proc}/gpus"), key=_bus_order):
        yield bus, _fields(f"{proc}/gpus/{bus}/information")


class Machine(NamedTuple):
    """The GPUs that this process may open, in PCI order, before CUDA_VISIBLE_DEVICES."""

    gpus: tuple[Gpu, ...] = ()
    instances: Mapping[str, tuple[str, ...]] = {}  # UUID of a GPU -> UUIDs of its MIG instances
    source: str = "none"
    doubt: str = ""  # why the answer may be wrong; "" if it is certain


def detect(
    environ: Mapping[str, str],
    *,
    proc: str = "/proc/driver/nvidia",
    dev: str = "/dev",
    timeout_s: float = 3.0,
) -> GpuFacts:
    """Return the GPUs that a CUDA program started with `environ` will see.

    Args:
        environ: the job's environment; PATH, CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER count.
        proc: the directory of the driver's files.
        dev: the directory of the device nodes.
        timeout_s: time limit for `nvidia-smi`, in seconds.

    Returns:
        The facts; no GPU and no warning on a machine without NVIDIA's driver. The machine's answers
        raise nothing.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.strip() in HIDE_ALL:
        return GpuFacts()
    machine = _survey(environ, wanted or "", proc=proc, dev=dev, timeout_s=timeout_s)
    if not machine.gpus:
        return GpuFacts(warning=machine.doubt)
    by_bus = environ.get("CUDA_DEVICE_ORDER", "").strip() == "PCI_BUS_ID"
    gpus, remark = visible(machine, wanted, by_bus=by_bus)
    warning = "; ".join(text for text in (machine.doubt, remark) if text)
    return GpuFacts(gpus, machine.source, warning)


# What CUDA makes of CUDA_VISIBLE_DEVICES (pure)


def visible(
    machine: Machine, wanted: str | None, *, by_bus: bool = False
) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that CUDA shows for a value of CUDA_VISIBLE_DEVICES, and a remark.

    The first entry decides how all are read: `GPU-…` as UUIDs, `MIG-…` as instances, anything
    else as numbers. An entry that names no GPU ends the list; a repeated one makes it empty.

    Args:
        machine: the machine's GPUs.
        wanted: the value; None if the variable is not set.
        by_bus: whether CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
    """
    if wanted is None:
        return _through_mig(machine, machine.gpus)
    if wanted.startswith("MIG-"):
        return _instance(machine, wanted)
    by_uuid = wanted.startswith("GPU-")
    chosen, remark = _take(wanted, machine.gpus, _by_uuid if by_uuid else _by_number)
    seen, mig = _through_mig(machine, chosen)
    names = {gpu.name for gpu in machine.gpus}
    if not by_uuid and not by_bus and len(names) > 1 and 0 < len(chosen) < len(machine.gpus):
        remark = remark or (
            f"CUDA_VISIBLE_DEVICES={wanted} counts from CUDA's fastest GPU, not along the PCI bus, "
            "and the GPUs here differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID to say which are meant"
        )
    return seen, remark or mig


def _take(
    wanted: str, gpus: Sequence[Gpu], find: Callable[[str, Sequence[Gpu]], int | None]
) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that the entries name, in their order, and the error in the entries."""
    chosen: list[Gpu] = []
    for entry in wanted.split(","):
        place = find(entry, gpus)
        if place is None:
            if entry.strip() in HIDE_ALL and chosen:
                return tuple(chosen), ""  # the documented way to end a list
            kept = "CUDA shows none" if not chosen else f"CUDA shows only the {len(chosen)} before"
            return tuple(chosen), f"CUDA_VISIBLE_DEVICES={wanted}: {entry!r} names no GPU; {kept}"
        if gpus[place] in chosen:
            return (), f"CUDA_VISIBLE_DEVICES={wanted}: {entry!r} is repeated; CUDA shows none"
        chosen.append(gpus[place])
    return tuple(chosen), ""


def _by_number(entry: str, gpus: Sequence[Gpu]) -> int | None:
    """Read a number like C's strtol (` 1`, `+1`, `1abc` and `01` are 1); None if not valid."""
    text = entry.lstrip()
    sign, text = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    if not digits or len(digits) > 9:  # nobody has a billion GPUs, and int() has a limit
        return None
    number = int(sign + digits)
    return number if 0 <= number < len(gpus) else None


def _by_uuid(entry: str, gpus: Sequence[Gpu]) -> int | None:
    """Return the index of the only GPU whose UUID begins so; text after a whole UUID is ignored."""
    if not entry.startswith("GPU-"):
        return None
    start = entry.rstrip()[:UUID_LENGTH].lower()
    found = [n for n, gpu in enumerate(gpus) if gpu.uuid.lower().startswith(start)]
    return found[0] if len(found) == 1 else None


def _through_mig(machine: Machine, gpus: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], str]:
    """Replace GPUs divided by MIG: CUDA shows one instance, and no whole GPU beside it."""
    for gpu in gpus:
        cut = machine.instances.get(gpu.uuid, ())
        if cut:
            remark = "" if len(gpus) == len(cut) == 1 else "MIG: CUDA shows one instance only"
            return (Gpu(None, cut[0], gpu.name, gpu.uuid),), remark
    return gpus, ""


def _instance(machine: Machine, wanted: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the MIG instance of the first entry; CUDA shows only one."""
    entry, _, others = wanted.partition(",")
    for gpu in machine.gpus:
        for uuid in machine.instances.get(gpu.uuid, ()):
            # Since driver 470 an instance has its own UUID; earlier the form was
            # MIG-GPU-<uuid>/<gi>/<ci>.
            old_form = entry.lower().startswith(f"mig-{gpu.uuid}/".lower())
            if uuid.lower() == entry.rstrip().lower() or old_form:
                remark = "MIG: CUDA shows the first instance only" if others else ""
                return (Gpu(None, entry.rstrip(), gpu.name, gpu.uuid),), remark
    return (), f"CUDA_VISIBLE_DEVICES={wanted}: {entry!r} names no MIG instance; CUDA shows none"


# What the machine says (the edge)


def _survey(
    environ: Mapping[str, str], wanted: str, *, proc: str, dev: str, timeout_s: float
) -> Machine:
    """Return the machine's GPUs: from /proc where that is certain, else from nvidia-smi.

    The child that asks NVML (gpu/ask_nvml.py) is not for this: where there is no driver it would
    cost each launch a Python process, 50 to 150 ms, to learn that there is no library. Whether
    nvidia-smi is on PATH costs nothing to see, and what it printed can be printed again by hand.
    """
    files = read_proc(proc, dev)
    unnamed = not all(gpu.uuid for gpu in files.gpus)  # unused since boot
    if files.gpus and not files.doubt and not unnamed and not _has_mig(proc, wanted):
        return files
    program = next(paths.on_path("nvidia-smi", environ), None)
    if program is None:
        return files
    answer = command.run((program, "-L"), environ, timeout_s)
    listed = parse_list(f"{answer.out}{answer.err}", answer.trouble)
    if listed.gpus or not files.gpus:
        return listed
    return files._replace(doubt=listed.doubt or files.doubt)


def read_proc(proc: str, dev: str) -> Machine:
    """Return the GPUs in the driver's files whose device node this process may open.

    The files show every GPU of the host, even in a container. CUDA and nvidia-smi skip (and do not
    count) GPUs whose node is missing or closed to us. access(2) also checks the device cgroup, and
    unlike open(2) it wakes no GPU.
    """
    gpus: list[Gpu] = []
    unread = missing = ""
    for bus, fields in information(proc):
        name, minor = fields.get("Model", ""), fields.get("Device Minor", "")
        if "Yes" in (fields.get("GPU Excluded"), fields.get("Blacklisted")):
            continue
        if not name or not minor:
            unread = f"{proc}/gpus/{bus}/information cannot be read or is incomplete"
            continue
        node = f"{dev}/nvidia{minor}"
        if os.access(node, os.R_OK | os.W_OK):
            uuid = fields.get("GPU UUID", "")  # GPU-????????-… until the GPU is first used
            gpus.append(Gpu(len(gpus), "" if "?" in uuid else uuid, name))
        elif not os.path.exists(node) and _makes_nodes(proc):
            missing = f"{node} does not exist yet"
    # Without any node, this is most likely a container without a GPU.
    doubt = unread or (missing if gpus else "")
    return Machine(tuple(gpus), source="proc" if gpus else "none", doubt=doubt)


def parse_list(output: str, trouble: str) -> Machine:
    """Parse the output of `nvidia-smi -L`; `trouble` is its error, "" for none."""
    gpus: list[Gpu] = []
    instances: dict[str, tuple[str, ...]] = {}
    strange = ""
    for line in output.splitlines():
        head, _, uuid = line.strip().rpartition(" (UUID: ")
        kind, _, rest = head.partition(" ")
        number, _, name = rest.partition(": ")
        if kind == "GPU" and number.isdecimal() and name:
            gpus.append(Gpu(int(number), uuid.rstrip(")"), name.strip()))
        elif kind == "MIG" and gpus:
            parent = gpus[-1].uuid
            instances[parent] = (*instances.get(parent, ()), uuid.rstrip(")"))
        elif line.strip() and not strange:
            strange = line.strip()[:200]
    message = printable(strange)
    doubt = ": ".join(text for text in (trouble, message) if text)
    if not gpus and not doubt:
        doubt = "it printed nothing"
    return Machine(
        tuple(gpus),
        instances,
        source="nvidia-smi" if gpus else "none",
        doubt=f"nvidia-smi -L: {doubt}" if doubt else "",
    )


def _has_mig(proc: str, wanted: str) -> bool:
    """Return whether MIG instances matter: one is wanted, or some GPU has one."""
    if wanted.startswith("MIG-"):
        return True
    return any(
        gpu.startswith("gpu") and name.startswith("gi")
        for gpu in procfiles.names(f"{proc}/capabilities")
        for name in procfiles.names(f"{proc}/capabilities/{gpu}/mig")
    )


def _makes_nodes(proc: str) -> bool:
    """Return whether the driver's libraries create missing device nodes (not in containers)."""
    return _fields(f"{proc}/params").get("ModifyDeviceFiles", "1") != "0"


def _fields(path: str) -> dict[str, str]:
    """Return the `Name:  value` lines of a file; {} if it cannot be read."""
    pairs = (line.partition(":") for line in procfiles.text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _bus_order(bus: str) -> tuple[list[int], str]:
    """Return the sort key of a PCI address such as 0000:c1:00.0, whose parts are hexadecimal."""
    try:
        return [int(part, 16) for part in bus.replace(".", ":").split(":")], bus
    except ValueError:
        return [], bus
