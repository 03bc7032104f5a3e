"""Ask NVIDIA's management library (NVML) about the GPUs, and print one JSON document.

    python3 ask_nvml.py [--health] [BUS]    of all GPUs, or of the one at a PCI address

This program runs in a child with a time limit from nvml.py: a failing GPU hangs any process that
asks it.

    {"library": "libnvidia-ml.so.1", "status": 0, "error": "", "driver": "580.95.05", "cuda": 13000,
     "cards": [{"place": 0, "bus": "0000:1a:00.0", "fields": {…}, "sick": [],
                "processes": [[71, 1024]]}],
     "lost": [{"place": 1, "why": "GPU is lost"}], "count": 2, "peers": [[0, 1, "OK"]], …}

Fields have the names of `nvidia-smi -q`, which findings quote and users can look up, and its texts.
What is counted or measured is a whole number: memory in MiB, clocks in MHz, power in mW, heat in
degrees Celsius, use in percent, time in ns, a link's width in lanes. What this driver or this GPU
does not have is left out. An error of the GPU stands in the value's place.

Functions: https://docs.nvidia.com/deploy/nvml-api/. Structures and numbers: nvml.h of CUDA 13, and
the same in nvidia-ml-py 12.535 to 13.615. Drivers before 550 report neither the state of the NVLink
fabric nor a needed reset; drivers before 580 report neither throttling counters nor pending
repairs. Single integers are read as 64 bits from zeroed memory: the lower half comes first on all
processors with NVIDIA drivers.

It uses only the standard library and no other file; the Python is saferun's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
MOST_PROCESSES = 1024
MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS
# NVML_ERROR_*
NO_PERMISSION, NOT_FOUND, TOO_SMALL, NO_FUNCTION, BAD_INFOROM, OTHER_VERSION = 4, 6, 7, 13, 14, 25
SICK = {15: "GPU is lost", 16: "GPU requires reset", 17: "GPU access blocked", 999: "Unknown Error"}
# Structures in struct(3) notation, with the compiler's padding. In a structure with a version
# (`_v2` …) the first integer is NVML_STRUCT_VERSION.
PCI = "16s5I32s"  # nvmlPciInfo_t: the last part is the address
MEMORY, OLD_MEMORY = "I4Q", "3Q"  # nvmlMemory_v2_t: total, reserved, free, used; nvmlMemory_t
TEMPERATURE = "IIi"  # nvmlTemperature_v1_t: sensor 0, degrees
SRAM = "I11QI0Q"  # nvmlEccSramErrorStatus_v1_t
REPAIR = "3I"  # nvmlRepairStatus_v1_t: of a channel, of a TPC
UNREPAIRABLE = "2I"  # nvmlUnrepairableMemoryStatus_v1_t
FABRIC = {3: "I16sIIBIB0I", 2: "I16sIIBI"}  # nvmlGpuFabricInfo_v3_t, _v2_t
VALUE = "IIqqIIQ"  # nvmlFieldValue_t: number, scope, times, type, status, value
PROCESS = "IQII"  # nvmlProcessInfo_t: pid, bytes, MIG instances
UNKNOWN_BYTES = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
REASONS = {  # nvmlClocksEventReason*
    "HW Slowdown": 0x08,
    "HW Slowdown/HW Thermal Slowdown": 0x40,
    "HW Slowdown/HW Power Brake Slowdown": 0x80,
    "SW Thermal Slowdown": 0x20,
    "SW Power Cap": 0x04,
}
Value = str | int
Form = Callable[[int], Value]  # `int`: the number as it is


def one_of(names: str) -> Callable[[int], str]:
    """Return a function from a number of an enumeration to its name; names begin at number 0."""
    known = names.split(",")
    return lambda number: known[number] if number < len(known) else f"number {number}"


ENABLED, YES = one_of("Disabled,Enabled"), one_of("No,Yes")
# NVML_GPU_RECOVERY_ACTION_*
RECOVERY = one_of(
    "None,Reset,Reboot,Drain P2P,Drain and Reset,Recover IMEX Domain,Bus Reset,System Reboot"
)
COMPUTE_MODE = one_of("Default,Exclusive_Thread,Prohibited,Exclusive_Process")
PEER = one_of("OK,CNS,GNS,TNS,DR,NS,U")  # the legend of `nvidia-smi topo -p2p`
FABRIC_STATE = one_of(",Not Started,In Progress,Completed")  # 0: not supported
FABRIC_HEALTH = one_of(",Healthy,Unhealthy,Limited Capacity")


class Nvml:
    """The library; a failed call gives a status, not an exception."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: Any) -> int:
        """Return the status of a function; NO_FUNCTION if this driver lacks it."""
        try:
            function = getattr(self.library, name)
        except AttributeError:
            return NO_FUNCTION
        return int(function(*arguments))

    def error(self, status: int) -> str:
        """Return NVML's text for a status."""
        self.library.nvmlErrorString.restype = ctypes.c_char_p
        text: bytes = self.library.nvmlErrorString(status) or b"unknown status"
        return text.decode("utf-8", "replace")


class Gpu:
    """One GPU, and the fields that it has answered.

    Args:
        nvml: the library.
        handle: an nvmlDevice_t.
    """

    def __init__(self, nvml: Nvml, handle: ctypes.c_void_p) -> None:
        self.nvml, self.handle = nvml, handle
        self.fields: dict[str, Value] = {}
        self.sick: list[str] = []  # fields that have an error

    def ask(self, name: str, *arguments: Any) -> int:
        """Return the status of nvmlDevice<name> for this GPU."""
        return self.nvml.call(f"nvmlDevice{name}", self.handle, *arguments)

    def put(self, status: int, fields: Mapping[str, Value]) -> bool:
        """Store fields, or an error instead; return whether the GPU has answered.

        Args:
            status: the status of NVML's function.
            fields: field -> text, used if the status is success.
        """
        if status in SICK:
            self.sick += fields
            fields = dict.fromkeys(fields, SICK[status])
        if status == 0 or status in SICK:
            self.fields.update(fields)
        return status == 0

    def text(self, field: str, name: str) -> None:
        """Ask a function that stores a text.

        Args:
            field: the field's name.
            name: the function's name after nvmlDevice.
        """
        buffer = ctypes.create_string_buffer(96)
        status = self.ask(name, buffer, 96)
        self.put(status, {field: buffer.value.decode("utf-8", "replace")})

    def numbers(self, name: str, forms: Mapping[str, Form], *before: Any) -> bool:
        """Ask a function that stores integers, one for each field, after its other arguments.

        Args:
            name: the function's name after nvmlDevice.
            forms: field -> function that writes its number as text.
            before: the function's other arguments.
        """
        values = [ctypes.c_ulonglong() for _ in forms]
        status = self.ask(name, *before, *map(ctypes.byref, values))
        found = (form(value.value) for form, value in zip(forms.values(), values, strict=True))
        return self.put(status, dict(zip(forms, found, strict=True)))

    def number(self, name: str, *before: Any) -> int:
        """Return the integer that a function stores; -1 if it fails."""
        value = ctypes.c_ulonglong()
        return -1 if self.ask(name, *before, ctypes.byref(value)) else value.value

    def structure(self, name: str, layout: str, version: int = 0) -> tuple[int, tuple[Any, ...]]:
        """Ask a function that fills a structure; return its status and the structure's parts.

        Args:
            name: the function's name after nvmlDevice.
            layout: the structure in struct(3) notation.
            version: the structure's version; 0 without one.
        """
        size = struct.calcsize(layout)
        buffer = ctypes.create_string_buffer(size)
        if version:
            struct.pack_into("I", buffer, 0, size | version << 24)
        return self.ask(name, buffer), struct.unpack(layout, buffer)

    def value(self, field: str, number: int, form: Form = int) -> bool:
        """Ask for a value by its number NVML_FI_*.

        Args:
            field: the field's name.
            number: the number NVML_FI_*.
            form: function that writes the value as text.
        """
        buffer = ctypes.create_string_buffer(struct.pack(VALUE, number, *[0] * 6))
        status = self.ask("GetFieldValues", 1, buffer)
        *_, of_value, found = struct.unpack_from(VALUE, buffer)
        return self.put(status or of_value, {field: form(found)})


def ask_state(gpu: Gpu) -> None:
    """Ask for the fields that locks, recovery and the live views use."""
    gpu.text("Product Name", "GetName")
    gpu.text("GPU UUID", "GetUUID")
    gpu.numbers("GetPersistenceMode", {"Persistence Mode": ENABLED})
    gpu.numbers("GetMigMode", {"MIG Mode/Current": ENABLED, "MIG Mode/Pending": ENABLED})
    if not gpu.value("GPU Recovery Action", 230, RECOVERY):  # drivers before 565
        gpu.value("GPU Reset Status/Reset Required", 226, YES)
        gpu.value("GPU Reset Status/Drain and Reset Recommended", 227, YES)
    parts = ["Total", "Reserved", "Free", "Used"]
    status, (_, *sizes) = gpu.structure("GetMemoryInfo_v2", MEMORY, 2)
    if status in (NO_FUNCTION, OTHER_VERSION):
        parts.remove("Reserved")
        status, sizes[:] = gpu.structure("GetMemoryInfo", OLD_MEMORY)
    named = zip(parts, sizes, strict=True)
    gpu.put(status, {f"FB Memory Usage/{part}": size >> 20 for part, size in named})
    status, load = gpu.structure("GetUtilizationRates", "2I")
    gpu.put(status, {"Utilization/GPU": load[0]})
    status, (*_, heat) = gpu.structure("GetTemperatureV", TEMPERATURE, 1)
    if not gpu.put(status, {"Temperature/GPU Current Temp": heat}):  # before 570
        gpu.numbers("GetTemperature", {"Temperature/GPU Current Temp": int}, 0)


def ask_health(gpu: Gpu) -> None:
    """Ask for the fields that only doctor judges."""
    gpu.numbers("GetComputeMode", {"Compute Mode": COMPUTE_MODE})
    _ask_memory_errors(gpu)
    _ask_clocks_and_power(gpu)
    gpu.numbers("GetMaxPcieLinkWidth", {"PCI/GPU Link Info/Link Width/Max": int})
    gpu.numbers("GetCurrPcieLinkWidth", {"PCI/GPU Link Info/Link Width/Current": int})
    _ask_fabric(gpu)


def _ask_memory_errors(gpu: Gpu) -> None:
    gpu.numbers("GetEccMode", {"ECC Mode/Current": ENABLED, "ECC Mode/Pending": ENABLED})
    status, sram = gpu.structure("GetSramEccErrorStatus", SRAM, 1)
    for counter, (kind, at) in enumerate((("Volatile", 4), ("Aggregate", 1))):
        start = f"ECC Errors/{kind}"
        causes = {f"{start}/SRAM Uncorrectable Parity": sram[at]}
        causes[f"{start}/SRAM Uncorrectable SEC-DED"] = sram[at + 1]
        if not gpu.put(status, causes):  # older drivers: one count
            where = {f"{start}/SRAM Uncorrectable": int}
            gpu.numbers("GetMemoryErrorCounter", where, 1, counter, 7)
        gpu.numbers("GetMemoryErrorCounter", {f"{start}/DRAM Uncorrectable": int}, 1, counter, 2)
    gpu.put(status, {"ECC Errors/Aggregate/SRAM Threshold Exceeded": YES(sram[-1])})
    status, (_, channel, tpc) = gpu.structure("GetRepairStatus", REPAIR, 1)
    gpu.put(status, {"ECC Errors/Channel Repair Pending": YES(channel)})
    gpu.put(status, {"ECC Errors/TPC Repair Pending": YES(tpc)})
    status, lasting = gpu.structure("GetUnrepairableMemoryFlag_v1", UNREPAIRABLE, 1)
    gpu.put(status, {"ECC Errors/Unrepairable Memory": YES(lasting[1])})
    counts: dict[str, Form] = {"Correctable Error": int, "Uncorrectable Error": int}
    rows = {**counts, "Pending": YES, "Remapping Failure Occurred": YES}
    gpu.numbers("GetRemappedRows", {f"Remapped Rows/{name}": form for name, form in rows.items()})
    retired = ctypes.c_uint(0)  # without a buffer only the count is returned
    status = gpu.ask("GetRetiredPages", 1, ctypes.byref(retired), None)
    status = 0 if status == TOO_SMALL else status
    gpu.put(status, {"Retired Pages/Double Bit ECC": retired.value})
    gpu.numbers("GetRetiredPagesPendingStatus", {"Retired Pages/Pending Page Blacklist": YES})


def _ask_clocks_and_power(gpu: Gpu) -> None:
    gpu.numbers("GetClockInfo", {"Clocks/SM": int}, 1)  # NVML_CLOCK_SM
    gpu.numbers("GetMaxClockInfo", {"Max Clocks/SM": int}, 1)
    reasons = gpu.number("GetCurrentClocksEventReasons")
    if reasons < 0:  # drivers before 535
        reasons = gpu.number("GetCurrentClocksThrottleReasons")
    for name, bit in REASONS.items() if reasons >= 0 else ():
        active = "Active" if reasons & bit else "Not Active"
        gpu.fields[f"Clocks Event Reasons/{name}"] = active
    # In nanoseconds. The numbers are those of driver 580 and newer; 575 had others, older drivers
    # none.
    gpu.value("Clocks Event Reasons Counters/HW Thermal Slowdown", 270)
    gpu.value("Clocks Event Reasons Counters/HW Power Braking", 271)
    if not gpu.value("GPU Power Readings/Instantaneous Power Draw", 186):
        gpu.numbers("GetPowerUsage", {"GPU Power Readings/Instantaneous Power Draw": int})
    gpu.numbers("GetEnforcedPowerLimit", {"GPU Power Readings/Current Power Limit": int})


def _ask_fabric(gpu: Gpu) -> None:
    for version, layout in FABRIC.items():
        status, found = gpu.structure("GetGpuFabricInfoV", layout, version)
        if status != OTHER_VERSION:
            break
    _, _, result, _, state, _, *health = found
    if status == 0 and state:
        gpu.fields["Fabric/State"] = FABRIC_STATE(state)
        gpu.fields["Fabric/Status"] = gpu.nvml.error(result) if result else "Success"
        gpu.fields["Fabric/Health/Summary"] = FABRIC_HEALTH(health[0]) if health else ""


def processes(gpu: Gpu) -> list[tuple[int, int | None]]:
    """Return pid and MiB of each process that computes on a GPU; None for unknown MiB."""
    size = struct.calcsize(PROCESS)
    buffer = ctypes.create_string_buffer(size * MOST_PROCESSES)
    count = ctypes.c_uint(MOST_PROCESSES)
    if gpu.ask("GetComputeRunningProcesses_v3", ctypes.byref(count), buffer):
        return []
    found = struct.iter_unpack(PROCESS, buffer.raw[: size * count.value])
    return [(pid, None if used == UNKNOWN_BYTES else used >> 20) for pid, used, *_ in found]


def links(gpu: Gpu) -> tuple[int, int]:
    """Return how many NVLinks of a GPU are active, and how many it has."""
    states = [gpu.number("GetNvLinkState", link) for link in range(MOST_LINKS)]
    known = [state for state in states if state >= 0]
    return sum(map(bool, known)), len(known)


def peers(gpus: Mapping[int, Gpu]) -> list[tuple[int, int, str]]:
    """Return the driver's answer for each pair: whether one GPU can read the other's memory."""
    codes = (
        (ours, other, gpus[ours].number("GetP2PStatus", gpus[other].handle, 0))
        for ours in gpus
        for other in gpus
        if ours != other
    )
    return [(ours, other, PEER(code)) for ours, other, code in codes if code >= 0]


def card(gpu: Gpu, health: bool) -> dict[str, Any]:
    """Return the facts about a GPU."""
    bus = gpu.structure("GetPciInfo_v3", PCI)[1][-1].partition(b"\0")[0].decode("ascii", "replace")
    gpu.fields["PCI/Bus Id"] = bus
    ask_state(gpu)
    found = {"place": gpu.number("GetIndex"), "bus": bus, "processes": processes(gpu)}
    if health:
        ask_health(gpu)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if not gpu.ask("GetCudaComputeCapability", ctypes.byref(major), ctypes.byref(minor)):
            found["capability"] = f"{major.value}.{minor.value}"
    fields = {name: value for name, value in gpu.fields.items() if value != ""}
    return {**found, "fields": fields, "sick": gpu.sick}


def examine(nvml: Nvml, bus: str, health: bool) -> dict[str, Any]:
    """Ask every GPU, or the one at a PCI address; return the document."""
    version, cuda, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    nvml.call("nvmlSystemGetDriverVersion", version, 96)
    nvml.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
    status = nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    found: dict[str, Any] = {"driver": version.value.decode("ascii", "replace"), "cuda": cuda.value}
    gpus: dict[int, Gpu] = {}
    cards: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    none_because = NOT_FOUND
    for place in range(1 if bus else count.value):
        handle = ctypes.c_void_p()
        how = ("HandleByPciBusId_v2", bus.encode()) if bus else ("HandleByIndex_v2", place)
        answered = nvml.call(f"nvmlDeviceGet{how[0]}", how[1], ctypes.byref(handle))
        if not answered:
            gpus[place] = Gpu(nvml, handle)
            cards.append(card(gpus[place], health))
            if health and gpus[place].ask("ValidateInforom") == BAD_INFOROM:
                status = BAD_INFOROM
        elif answered == NO_PERMISSION:  # not assigned to this container or job
            none_because = answered
        else:
            lost.append({"place": place, "why": nvml.error(answered)})
    if len(gpus) > 1 and health:
        found["peers"] = peers(gpus)
        found["links"] = [(place, *links(gpu)) for place, gpu in gpus.items()]
    if not (status or cards or lost):
        status = none_because
    return {**found, "status": status, "cards": cards, "lost": lost, "count": count.value}


def main(arguments: list[str]) -> None:
    """Print the document."""
    found: dict[str, Any]
    try:
        nvml = Nvml()
    except OSError as why:
        error = f"{LIBRARY} cannot be loaded"
        found = {"library": "", "status": 0, "error": error, "message": str(why)}
    else:
        bus = next((word for word in arguments if not word.startswith("-")), "")
        if status := nvml.call("nvmlInit_v2"):
            error = f"Failed to initialize NVML: {nvml.error(status)}"  # as nvidia-smi prints it
            found = {"status": status, "error": error}
        else:
            found = examine(nvml, bus, "--health" in arguments)
            found["error"] = nvml.error(found["status"]) if found["status"] else ""
        found["library"] = LIBRARY
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # unloading the library may hang, too


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    main(sys.argv[1:])
