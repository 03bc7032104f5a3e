"""A fake nvidia-smi for doctor's tests: its reports, and a program that prints them.

The reports are built field by field, in the forms of the driver series that gpu/nvidia_smi.py
reads. tests/gpu/real/test_doctor_gpu.py compares them with those of a real nvidia-smi.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence

import pytest
from fakecuda import SOURCE, compiled, uuid
from runs import executable

from saferun.doctor.vitals import Files, Smi
from saferun.gpu import nvidia_smi

# Each field as `section/name`; a test changes some. The names are those of series 580.
WELL = {
    "Product Name": "NVIDIA H200",
    "Product Brand": "NVIDIA",
    "Persistence Mode": "Enabled",
    "MIG Mode/Current": "Disabled",
    "MIG Mode/Pending": "Disabled",
    "GPU UUID": "{uuid}",
    "Minor Number": "{number}",
    "GPU Recovery Action": "None",
    "PCI/Bus Id": "0000{bus}",
    "PCI/GPU Link Info/PCIe Generation/Max": "5",
    "PCI/GPU Link Info/Link Width/Max": "16x",
    "PCI/GPU Link Info/Link Width/Current": "16x",
    "Clocks Event Reasons/Idle": "Active",
    "Clocks Event Reasons/SW Power Cap": "Not Active",
    "Clocks Event Reasons/HW Slowdown": "Not Active",
    "Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown": "Not Active",
    "Clocks Event Reasons/HW Slowdown/HW Power Brake Slowdown": "Not Active",
    "Clocks Event Reasons/SW Thermal Slowdown": "Not Active",
    "Clocks Event Reasons Counters/SW Power Capping": "3737587 us",
    "Clocks Event Reasons Counters/HW Thermal Slowdown": "0 us",
    "Clocks Event Reasons Counters/HW Power Braking": "0 us",
    "FB Memory Usage/Total": "143771 MiB",
    "FB Memory Usage/Reserved": "620 MiB",
    "FB Memory Usage/Used": "0 MiB",
    "FB Memory Usage/Free": "143150 MiB",
    "Compute Mode": "Default",
    "ECC Mode/Current": "Enabled",
    "ECC Mode/Pending": "Enabled",
    "ECC Errors/Volatile/SRAM Correctable": "0",
    "ECC Errors/Volatile/SRAM Uncorrectable Parity": "0",
    "ECC Errors/Volatile/SRAM Uncorrectable SEC-DED": "0",
    "ECC Errors/Volatile/DRAM Correctable": "0",
    "ECC Errors/Volatile/DRAM Uncorrectable": "0",
    "ECC Errors/Aggregate/DRAM Uncorrectable": "0",
    "ECC Errors/Aggregate/SRAM Threshold Exceeded": "No",
    "ECC Errors/Channel Repair Pending": "No",
    "Retired Pages/Single Bit ECC": "N/A",
    "Retired Pages/Double Bit ECC": "N/A",
    "Retired Pages/Pending Page Blacklist": "N/A",
    "Remapped Rows/Correctable Error": "0",
    "Remapped Rows/Uncorrectable Error": "0",
    "Remapped Rows/Pending": "No",
    "Remapped Rows/Remapping Failure Occurred": "No",
    "Remapped Rows/Bank Remap Availability Histogram/Max": "3072 bank(s)",
    "Temperature/GPU Current Temp": "32 C",
    "GPU Power Readings/Instantaneous Power Draw": "76.10 W",
    "GPU Power Readings/Current Power Limit": "700.00 W",
    "Fabric/State": "Completed",
    "Fabric/Status": "Success",
    "Fabric/Health/Summary": "Healthy",
    "Processes": "None",
}


def bus(number: int) -> str:
    """Return the PCI address of a GPU, as /sys writes it."""
    return f"0000:{0x1A + number:02x}:00.0"


def fields(number: int = 0, **changed: str) -> dict[str, str]:
    """Return a GPU's fields, some changed: fields(1, **{"ECC Mode/Current": "Disabled"})."""
    found = {
        name: value.format(uuid=uuid(number), number=number, bus=bus(number).upper())
        for name, value in WELL.items()
    }
    found |= changed
    last = found.pop("Processes")  # what a real one prints below it is none of these fields
    return {**found, "Processes": last}


def report(
    cards: Sequence[Mapping[str, str]],
    *,
    driver: str = "580.95.05",
    cuda: str = "13.0",
    processes: Mapping[int, Sequence[tuple[int, str, int]]] | None = None,
) -> str:
    """Return a report as `nvidia-smi -q` prints it: sections by indentation, values in a column.

    Args:
        cards: the fields of each GPU.
        driver: its version.
        cuda: the newest version that the driver supports.
        processes: by number of the GPU: pid, name and memory in MiB.
    """
    lines = [
        "",
        "==============NVSMI LOG==============",
        "",
        "Timestamp                                              : Sat Nov 21 14:23:04 2026",
        f"Driver Version                                         : {driver}",
        f"CUDA Version                                           : {cuda}",
        "",
        f"Attached GPUs                                          : {len(cards)}",
    ]
    for number, card in enumerate(cards):
        lines += [f"GPU 0000{bus(number).upper()}", *_laid_out(card)]
        for pid, name, used in (processes or {}).get(number, ()):
            lines += [
                "        GPU instance ID                   : N/A",
                f"        Process ID                        : {pid}",
                "            Type                          : C",
                f"            Name                          : {name}",
                f"            Used GPU Memory               : {used} MiB",
            ]
        lines.append("")
    return "\n".join(lines) + "\n"


def _laid_out(card: Mapping[str, str]) -> Iterator[str]:
    above: list[str] = []
    for name, value in card.items():
        *sections, last = name.split("/")
        for depth, section in enumerate(sections):
            if (
                above[depth : depth + 1] != [section]
                and "/".join(sections[: depth + 1]) not in card
            ):
                yield " " * 4 * (depth + 1) + section
        above = [*sections, last]
        yield f"{' ' * 4 * (len(sections) + 1) + last:<55}: {value}"


def program(folder: pathlib.Path, answers: dict[str, str], otherwise: str = "exit 0") -> None:
    """Write an nvidia-smi: for each line of arguments a shell command."""
    cases = "".join(f"  {line!r}) {command} ;;\n" for line, command in answers.items())
    text = f'#!/bin/sh\ncase "$*" in\n{cases}  *) {otherwise} ;;\nesac\n'
    executable(folder / "nvidia-smi", text)


def machine(folder: pathlib.Path, text: str, count: int, **answers: str) -> None:
    """Write an nvidia-smi for `count` GPUs whose `-q` prints a report.

    Args:
        folder: for the program and what it prints.
        text: the report.
        count: of GPUs, for its other answers.
        answers: shell commands by line of arguments, which replace the usual ones.
    """
    (folder / "q.txt").write_text(text)
    listed = [f"GPU {n}: NVIDIA H200 (UUID: {fields(n)['GPU UUID']})" for n in range(count)]
    (folder / "list.txt").write_text("\n".join(listed) + "\n")
    (folder / "caps.txt").write_text("".join(f"0000{bus(n).upper()}, 9.0\n" for n in range(count)))
    heads = "\t" + "\t".join(f"GPU{n}" for n in range(count))
    rows = [
        f"GPU{a}\t" + "\t".join("X" if a == b else "OK" for b in range(count)) for a in range(count)
    ]
    (folder / "peers.txt").write_text("\n".join([heads, *rows, "", "Legend:", "  X    = Self"]))
    links = [f"{line}\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s" for line in listed]
    (folder / "links.txt").write_text("\n".join(links) + "\n")
    known = {
        "-q": f"cat {folder}/q.txt",
        "-L": f"cat {folder}/list.txt",
        "--query-gpu=pci.bus_id,compute_cap --format=csv,noheader": f"cat {folder}/caps.txt",
        "topo -p2p r": f"cat {folder}/peers.txt",
        "nvlink -s": f"cat {folder}/links.txt",
    }
    program(folder, {**known, **answers}, 'echo "ERROR: $*"; exit 2')


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a CUDA driver library whose GPUs are host memory (tests/support/fakes)."""
    return compiled(tmp_path_factory.mktemp("libcuda"), SOURCE.with_name("peers.c"))


FILES = Files(
    version="580.95.05",
    gpus={bus(0): "NVIDIA H200", bus(1): "NVIDIA H200"},
    nodes=dict.fromkeys(("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"), "ok"),
    manager=True,
)


def reported(*cards, processes=None, **changed):
    read = nvidia_smi.parse(report(cards))
    apps = {
        cards[number]["GPU UUID"]: tuple(nvidia_smi.Process(*process) for process in found)
        for number, found in (processes or {}).items()
    }
    return Smi("/usr/bin/nvidia-smi", nvidia_smi.with_processes(read, apps), **changed)
