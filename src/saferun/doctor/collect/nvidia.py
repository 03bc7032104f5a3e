"""The NVIDIA driver's reports: in its files, by NVML, and to a child that uses libcuda.

This module collects only facts (vitals.py): gpu/nvml.py reads the answers, checks_gpu.py judges
them. One deadline limits everything, since a failing GPU hangs any process that asks it. If the
report on all GPUs does not come, each GPU is asked separately, so that the one without an answer
can be named.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from saferun.base import proc as procfiles  # `proc` is a place here
from saferun.base import untrusted
from saferun.doctor.collect import together
from saferun.doctor.vitals import Cuda, Files
from saferun.gpu import nvml, orphans
from saferun.system import command as bounded
from saferun.system import gpus, procfs

REPORT_S = 8.0  # NVML takes 0.1 to 2 s, and longer without persistence mode
ALONE_S = 4.0  # for each GPU, all at once: twice the normal time of the full report
PEERS_S = 9.0  # 8 GPUs: contexts 1.5 s, 56 pairs 1 s


def driver_files(
    proc: str = "/proc/driver/nvidia",
    dev: str = "/dev",
    tasks: str = "/proc",
    pci: str = "/sys/bus/pci/devices",
) -> Files:
    """Return the driver's entries in /proc, /dev and /sys; takes milliseconds, wakes no GPU.

    Args:
        proc: the driver's directory.
        dev: the directory of device files.
        tasks: the directory of processes.
        pci: the directory of PCI devices.
    """
    machine = {nvml.bus_id(bus): fields for bus, fields in gpus.information(proc)}
    version = gpus.driver_version(proc)
    minors = filter(None, (fields.get("Device Minor") for fields in machine.values()))
    wanted = ["nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in minors)]
    present = version or os.path.exists(f"{dev}/nvidiactl")
    numa = {bus: procfiles.text(f"{pci}/{bus}/numa_node").strip() for bus in machine}
    return Files(
        version=version,
        gpus={bus: fields.get("Model", "") for bus, fields in machine.items()},
        nodes={name: _node(f"{dev}/{name}") for name in wanted} if present else {},
        amd=os.path.exists(f"{dev}/kfd"),
        wsl=os.path.exists(f"{dev}/dxg"),
        pci=sum(_is_gpu(f"{pci}/{device}") for device in procfiles.names(pci)),
        manager=_runs("nv-fabricmanager", tasks),
        numa={bus: int(node) for bus, node in numa.items() if node.isdecimal()},
    )


def _is_gpu(device: str) -> bool:
    """Return whether a PCI device is an NVIDIA (10de) display controller (03) of this system."""
    driver = os.path.join(device, "driver")
    taken = os.path.islink(driver) and os.path.basename(os.readlink(driver)) == "vfio-pci"
    vendor, kind = (procfiles.text(os.path.join(device, n)).strip() for n in ("vendor", "class"))
    return vendor == "0x10de" and kind.startswith("0x03") and not taken


def _node(path: str) -> str:
    if not os.path.exists(path):
        return "missing"
    return "ok" if os.access(path, os.R_OK | os.W_OK) else "closed"


def _runs(name: str, tasks: str) -> bool:
    """Return whether a program is running; the kernel keeps 15 characters of its name."""
    for pid in filter(str.isdecimal, procfiles.names(tasks)):
        if procfiles.text(f"{tasks}/{pid}/comm").strip() == name[:15]:
            return True
    return False


def ask_nvml(environ: Mapping[str, str], known: Sequence[str], end: float) -> nvml.NvmlAnswer:
    """Return all of NVML's answers.

    Args:
        environ: the job's environment.
        known: PCI addresses from the driver's files, to ask each GPU separately.
        end: deadline on the monotonic clock, in seconds; nothing is asked after it.
    """
    answer = nvml.ask(environ, _left(end, REPORT_S), health=True, known=known)
    if answer.status is None:
        answer = _one_by_one(answer, environ, known, end)
    return answer._replace(report=_named(answer.report))


def _one_by_one(
    all_of_them: nvml.NvmlAnswer, environ: Mapping[str, str], buses: Sequence[str], end: float
) -> nvml.NvmlAnswer:
    """Ask each GPU separately, all at once, and make one report of the answers that come."""
    allowed = _left(end, ALONE_S)
    questions = {
        bus: functools.partial(nvml.ask, environ, allowed, health=True, bus=bus) for bus in buses
    }
    answers = together.ask(questions, allowed + 1).answers
    reports = [answers[bus].report for bus in buses if bus in answers]
    cards = tuple(card for report in reports for card in report.cards)
    lost = tuple(
        nvml.Lost(bus, gone.why, place)
        for place, bus in enumerate(buses)
        if bus in answers
        for gone in answers[bus].report.lost
    )
    first = next((report for report in reports if report.driver), all_of_them.report)
    silent = tuple(b for b in buses if b not in answers or answers[b].status is None)
    return all_of_them._replace(report=first._replace(cards=cards, lost=lost), silent=silent)


def _named(report: nvml.NvmlReport) -> nvml.NvmlReport:
    """Name the processes that have a GPU open by /proc; others may be in another container."""
    if not any(card.processes for card in report.cards):
        return report
    opened = orphans.openers(None)
    cards = []
    for card in report.cards:
        held = (
            p._replace(name=procfs.comm(p.pid)) if p.pid in opened else p for p in card.processes
        )
        cards.append(card._replace(processes=tuple(held)))
    return report._replace(cards=tuple(cards))


def _left(end: float, most: float) -> float:
    return max(0.2, min(most, end - time.monotonic()))


def ask_cuda(environ: Mapping[str, str], timeout_s: float) -> Cuda:
    """Ask CUDA's driver library, in a child, which GPUs it shows and whether pairs can copy."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peercheck.py")
    answer = bounded.run((sys.executable, "-IS", program), environ, timeout_s)
    return read_peercheck(answer)


def read_peercheck(answer: bounded.Answer) -> Cuda:
    """Parse the lines of peercheck.py, complete or partial."""
    top: dict[str, Any] = {}
    devices: dict[int, Any] = {}  # the values are arguments of CudaDevice
    pairs: list[Any] = []
    begun: tuple[int, int] | None = None
    for record in untrusted.objects(answer.out.encode()):
        if "device" in record:
            devices.setdefault(record["device"], {}).update(record)
        elif "pair" not in record:
            top.update(record)
        elif len(record) > 1:
            pairs.append(record)
            begun = None
        else:
            begun = (record["pair"][0], record["pair"][1])
    trouble = answer.trouble or ("" if top else "it printed nothing")
    return Cuda(
        asked=True,
        missing=str(top.get("missing", "")),
        init=str(top.get("init", "")),
        status=int(top.get("status", 0)),
        driver=int(top.get("driver", 0)),
        devices=tuple(devices[place] for place in sorted(devices)),
        pairs=tuple(pairs),
        hung=begun if answer.trouble else None,
        trouble=": ".join(filter(None, (trouble, answer.err.strip()[-200:]))) if trouble else "",
    )
