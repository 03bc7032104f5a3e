"""The driver's events in the kernel log, and their meaning in NVIDIA's catalogue.

The formats of the lines: https://docs.nvidia.com/deploy/xid-errors/index.html; for NVSwitches
(SXid): the Fabric Manager User Guide. The catalogue is knowledge/xid.yaml, which `catalogue` reads;
the other functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from saferun.gpu.nvml import bus_id
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Finding

SOURCE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
_XID = r"NVRM:.*?\bXid \(([^)]*)\): (\d{1,6})(?:, (.*))?"
_SXID = r"nvidia-nvswitch\d*:.*?\bSXid \(([^)]*)\): (\d{1,6}), (.*)"
_REQUEST = re.compile(r"GPU recovery action changed from .*? to 0x[0-9a-fA-F]+ \(([^)]*)\)")
_APPLICATION = "`compute-sanitizer` or CUDA_LAUNCH_BLOCKING=1 on the job names the kernel"


@dataclass(frozen=True, slots=True)
class Meaning:
    """The catalogue's entry for a code."""

    means: str
    fault: str
    blame: str  # the cause, for people
    action: str
    fix: str  # with {gpu} for the GPU's number


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the kernel log."""

    bus: str  # 0000:c1:00.0; "" if the line has none
    code: int
    text: str
    switch: bool = False  # an SXid: from an NVSwitch, not a GPU


def catalogue() -> dict[int, Meaning]:
    """Return the meaning of each code of xid.yaml."""
    document = loader.load("xid.yaml")
    faults, fixes = document["faults"], document["fixes"]
    return {
        code: Meaning(
            row["means"], row["fault"], faults[row["fault"]], row["action"], fixes[row["action"]]
        )
        for row in document["xids"]
        for code in row["codes"]
    }


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of a kernel log, in its order."""
    for line in lines:
        if found := re.search(_XID, line):
            yield Event(_bus(found[1]), int(found[2]), found[3] or "")
        elif found := re.search(_SXID, line):
            yield Event(_bus(found[1]), int(found[2]), found[3], switch=True)


def _bus(text: str) -> str:
    """Return the address in "PCI:0000:c1:00" or "0000:c1:00.0", always with the function."""
    found = re.search(r"([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(\.[0-9a-fA-F])?", text)
    return bus_id(found[1] + (found[2] or ".0")) if found else ""


def judge(
    events: Sequence[Event],
    known: Mapping[int, Meaning],
    numbers: Mapping[str, int],
    well: Iterable[str] = (),
) -> list[Finding]:
    """Judge the events since boot, each code once for each GPU.

    Args:
        events: the events in the kernel log.
        known: the catalogue.
        numbers: the GPUs' numbers by PCI address.
        well: addresses of GPUs that now need no recovery by the driver: their events are over.

    Returns:
        A finding for each code of each GPU, in the log's order.
    """
    if not events:
        return [Finding(OK, "kernel log", "no Xid since the machine started")]
    counts: dict[tuple[str, int, bool], list[Event]] = {}
    for event in events:
        counts.setdefault((event.bus, event.code, event.switch), []).append(event)
    return [_finding(same, known, numbers, frozenset(well)) for same in counts.values()]


def _finding(
    same: Sequence[Event],
    known: Mapping[int, Meaning],
    numbers: Mapping[str, int],
    over: frozenset[str],
) -> Finding:
    last = same[-1]
    times = "" if len(same) == 1 else f", {len(same)} times"
    if last.switch:
        return _switch(last, times)
    number = numbers.get(last.bus)
    area = f"GPU {number}" if number is not None else f"GPU at {last.bus or 'unknown address'}"
    meaning = known.get(last.code)
    if meaning is None:
        what = f"Xid {last.code}{times}: not in the catalogue"
        return Finding(NOTE, area, what, last.text, f"look it up: {SOURCE}")
    what = f"Xid {last.code}{times}: {meaning.means} ({meaning.blame})"
    request = _REQUEST.search(last.text)
    if request:
        what = f"Xid {last.code}{times}: the driver asked for: {request[1]}"
    serious = meaning.action in ("reset", "reboot", "link", "mechanics")
    if serious and last.bus in over:
        return Finding(NOTE, area, what, f"{last.text}. The driver asks for nothing now.")
    fix = meaning.fix.format(gpu=number if number is not None else last.bus)
    if meaning.fault == "application":
        fix = f"a fault of the job, not of the GPU: {_APPLICATION}"
    return Finding(PROBLEM if serious else NOTE, area, what, f"{last.text} <{SOURCE}>", fix)


def _switch(event: Event, times: str) -> Finding:
    fatal = event.text.lower().startswith("fatal")
    return Finding(
        PROBLEM if fatal else NOTE,
        f"NVSwitch {event.bus}",
        f"SXid {event.code}{times}{': fatal' if fatal else ''}",
        event.text,
        "reset all GPUs and NVSwitches together, or reboot" if fatal else "",
    )
