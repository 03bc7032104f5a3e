"""What the NVIDIA driver reports: in its files, by nvidia-smi, and to a child that uses libcuda.

Facts only (vitals.py): gpu/nvidia_smi.py parses the output, checks_gpu.py judges. One deadline
bounds everything, since a failing GPU hangs whoever asks it. Where the report of all GPUs does not
come, each GPU is asked alone, so that the one that does not answer can be named.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from saferun.doctor.collect import together
from saferun.doctor.vitals import Cuda, Files, Smi
from saferun.gpu import nvidia_smi, orphans
from saferun.system import command as bounded
from saferun.system import gpus, paths, procfs
from saferun.system.printable import printable

REPORT_S = 8.0  # `nvidia-smi -q` takes 0.1 to 2 s, and longer without persistence mode
ALONE_S = 4.0  # each GPU, all at once: twice what the report of all takes where all is well
DETAIL_S = 3.0  # a query of a few fields: less than a second
PEERS_S = 9.0  # 8 GPUs: contexts 1.5 s, 56 pairs 1 s
_FIRST_GPU = "\nGPU 0"  # below it the report may hold other users' text


def driver_files(
    proc: str = "/proc/driver/nvidia",
    dev: str = "/dev",
    tasks: str = "/proc",
    pci: str = "/sys/bus/pci/devices",
) -> Files:
    """Return what the driver shows in /proc, /dev and /sys; takes milliseconds, wakes no GPU.

    Args:
        proc: the driver's directory.
        dev: the directory of device files.
        tasks: the directory of processes.
        pci: the directory of PCI devices.
    """
    machine = {nvidia_smi.bus_id(bus): fields for bus, fields in gpus.information(proc)}
    version = gpus.driver_version(proc)
    minors = filter(None, (fields.get("Device Minor") for fields in machine.values()))
    wanted = ["nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in minors)]
    present = version or os.path.exists(f"{dev}/nvidiactl")
    return Files(
        version=version,
        gpus={bus: fields.get("Model", "") for bus, fields in machine.items()},
        nodes={name: _node(f"{dev}/{name}") for name in wanted} if present else {},
        amd=os.path.exists(f"{dev}/kfd"),
        wsl=os.path.exists(f"{dev}/dxg"),
        pci=sum(_is_gpu(f"{pci}/{device}") for device in procfs.names(pci)),
        manager=_runs("nv-fabricmanager", tasks),
    )


def _is_gpu(device: str) -> bool:
    """Return whether a PCI device is an NVIDIA (10de) display controller (03) of this system."""
    driver = os.path.join(device, "driver")
    taken = os.path.islink(driver) and os.path.basename(os.readlink(driver)) == "vfio-pci"
    vendor, kind = (procfs.text(os.path.join(device, n)).strip() for n in ("vendor", "class"))
    return vendor == "0x10de" and kind.startswith("0x03") and not taken


def _node(path: str) -> str:
    if not os.path.exists(path):
        return "missing"
    return "ok" if os.access(path, os.R_OK | os.W_OK) else "closed"


def _runs(name: str, tasks: str) -> bool:
    """Return whether a program runs; the kernel keeps 15 characters of its name."""
    for pid in filter(str.isdecimal, procfs.names(tasks)):
        if procfs.text(f"{tasks}/{pid}/comm").strip() == name[:15]:
            return True
    return False


def ask_smi(environ: Mapping[str, str], known: Sequence[str], end: float) -> Smi:
    """Return all that nvidia-smi reports.

    Args:
        environ: PATH decides which nvidia-smi.
        known: PCI addresses from the driver's files, for asking each GPU alone.
        end: the monotonic clock's, in seconds; nothing is asked after it.

    Returns:
        The answers; empty where there is no nvidia-smi.
    """
    program = next(paths.on_path("nvidia-smi", environ), None)
    if program is None:
        return Smi()
    answer = bounded.run((program, "-q"), environ, _left(end, REPORT_S))
    report = nvidia_smi.parse(answer.out, answer.err, known)
    message = _message(f"{answer.out.partition(_FIRST_GPU)[0]}\n{answer.err}", bool(report.cards))
    smi = Smi(program, report, answer.status, answer.trouble, report.forged or message)
    hung = answer.status is None
    if report.forged or hung:
        smi = _one_by_one(smi, environ, known, end)
    ask_more = smi.report.cards and (report.forged or not hung)
    return _details(smi, environ, end) if ask_more else smi


def _message(text: str, report: bool) -> str:
    """Return what the program printed; where that includes a report, without it."""
    lines = [line for line in text.splitlines() if line.strip()]
    if report:
        parts = (" ", "=", "GPU 0")
        lines = [line for line in lines if not (line.startswith(parts) or " : " in line)]
    text = " ".join(" ".join(lines).split())[:300]
    return printable(text)


def _one_by_one(smi: Smi, environ: Mapping[str, str], buses: Sequence[str], end: float) -> Smi:
    """Ask each GPU alone, all at once, and put a report together from the answers that come."""
    allowed = _left(end, ALONE_S)

    def ask(bus: str) -> bounded.Answer:
        return bounded.run((smi.program, "-q", "-i", bus), environ, allowed)

    questions = {bus: functools.partial(ask, bus) for bus in buses}
    answers = together.ask(questions, allowed + 1).answers
    reports = [nvidia_smi.parse(answers[b].out, known=(b,)) for b in buses if b in answers]
    cards = tuple(card for report in reports for card in report.cards)
    first = next((report for report in reports if report.driver), smi.report)
    silent = tuple(b for b in buses if b not in answers or answers[b].status is None)
    return smi._replace(report=first._replace(cards=cards), silent=silent)


def _details(smi: Smi, environ: Mapping[str, str], end: float) -> Smi:
    """Ask for what the report leaves out, until something does not answer."""

    def ask(*arguments: str) -> str | None:
        answer = bounded.run((smi.program, *arguments), environ, _left(end, DETAIL_S))
        return answer.out if answer.status is not None else None

    caps = ask(*nvidia_smi.CAPABILITIES)
    several = len(smi.report.cards) > 1
    peers = ask("topo", "-p2p", "r") if several and caps is not None else None
    links = ask("nvlink", "-s") if several and peers is not None else None
    apps = ask(*nvidia_smi.APPS) if links is not None or not several else None
    return smi._replace(
        report=nvidia_smi.with_processes(smi.report, _named(nvidia_smi.parse_apps(apps or ""))),
        capabilities=nvidia_smi.parse_capabilities(caps or ""),
        peers=nvidia_smi.parse_peers(peers or ""),
        links=nvidia_smi.parse_links(links or ""),
    )


def _named(
    apps: Mapping[str, Sequence[nvidia_smi.Process]],
) -> dict[str, tuple[nvidia_smi.Process, ...]]:
    """Name the processes that /proc shows with a GPU open; others may be another container's."""
    opened = orphans.openers(None) if apps else {}
    return {
        uuid: tuple(p._replace(name=procfs.comm(p.pid)) if p.pid in opened else p for p in found)
        for uuid, found in apps.items()
    }


def _left(end: float, most: float) -> float:
    return max(0.2, min(most, end - time.monotonic()))


def ask_cuda(environ: Mapping[str, str], timeout_s: float) -> Cuda:
    """Ask CUDA's driver library, in a child, which GPUs it shows and whether pairs can copy."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peercheck.py")
    answer = bounded.run((sys.executable, "-IS", program), environ, timeout_s)
    return read_peercheck(answer)


def read_peercheck(answer: bounded.Answer) -> Cuda:
    """Parse the lines of peercheck.py, all or as far as it came."""
    top: dict[str, Any] = {}
    devices: dict[int, Any] = {}  # their values are CudaDevices
    pairs: list[Any] = []
    begun: tuple[int, int] | None = None
    for line in answer.out.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
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
