"""Differences of a rank's GPU and CPU from the other ranks': why it may be slow.

The driver's library NVML tells about the GPUs, in a child that nobody waits for; /proc tells about
the CPUs. Only a difference from the other ranks counts, since all may run at a power limit.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from saferun.base import proc
from saferun.gpu import nvml
from saferun.gpu.nvml import Card
from saferun.system import procfs
from saferun.system.command import Child

_LOWER = 0.9  # of the others' clock; temperature does not explain so low a value
_WAITED = 0.05  # part of the time that a rank waits for a CPU
_SWAPPED_MIB = 100
_REASONS = (
    *("HW Slowdown", "HW Slowdown/HW Thermal Slowdown", "HW Slowdown/HW Power Brake Slowdown"),
    *("SW Thermal Slowdown", "SW Power Cap"),
)
_ERRORS = re.compile(r"ECC Errors/Volatile/.*Uncorrectable|Remapped Rows/Uncorrectable")


@dataclass(frozen=True, slots=True)
class CpuState:
    """The state of one rank in /proc at one time."""

    at_s: float
    cpus: frozenset[int]  # CPUs on which it may run
    delay_s: float  # seconds that its main thread has waited for one of them
    swapped_mib: int


def cpu_state(pid: int, at_s: float) -> CpuState:
    """Return a process's present state in /proc; an empty one if it is gone."""
    status = proc.text(f"/proc/{pid}/status")
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    swapped = re.search(r"^VmSwap:\s*(\d+) kB$", status, re.MULTILINE)
    times = proc.text(f"/proc/{pid}/schedstat").split()
    delay_s = int(times[1]) / 1e9 if len(times) > 1 and times[1].isdigit() else 0.0
    mib = int(swapped[1]) >> 10 if swapped else 0
    return CpuState(at_s, frozenset(procfs.numbers(allowed[1] if allowed else "")), delay_s, mib)


def stolen() -> tuple[int, int]:
    """Return the ticks that the host took from this virtual machine, and all ticks (proc(5))."""
    fields = proc.text("/proc/stat").partition("\n")[0].split()[1:9]
    ticks = [int(field) for field in fields if field.isdigit()]
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)


def ask_cards(environ: Mapping[str, str]) -> Child:
    """Ask NVML for the health of the GPUs, without waiting for its answer.

    Args:
        environ: the user's environment, in which NVML is found.
    """
    return Child((*nvml.COMMAND, "--health"), environ)


def answer_of(asked: Child) -> nvml.NvmlReport:
    """Return NVML's answer; an empty one if none has come. Call it once."""
    return nvml.read(asked.take()).report


def of_ranks(
    report: nvml.NvmlReport, ranks: Mapping[int, int], uuids: Sequence[str]
) -> dict[int, Card]:
    """Return each rank's GPU: the one on which it has memory, else the one at its position.

    Args:
        report: NVML's answer.
        ranks: rank -> pid, for this machine.
        uuids: UUIDs of the job's GPUs, in the job's order.
    """
    found: dict[int, Card] = {}
    for place, (rank, pid) in enumerate(sorted(ranks.items())):
        held = [card for card in report.cards if pid in (one.pid for one in card.processes)]
        by_place = report.card(uuids[place]) if len(uuids) >= len(ranks) else None
        if card := held[0] if len(held) == 1 else by_place:
            found[rank] = card
    return found


def of_gpu(cards: Mapping[int, Card], rank: int, pids: Collection[int]) -> list[str]:
    """Return clauses on how a rank's GPU differs from the others'.

    Args:
        cards: the GPU of each rank.
        rank: the rank to compare.
        pids: pids of the job's processes.
    """
    mine, others = cards.get(rank), [card for one, card in cards.items() if one != rank]
    if mine is None or not others:
        return []
    found = []
    clock, usual = mine.number("Clocks/SM"), _median(others, "Clocks/SM")
    if clock is not None and usual and clock < _LOWER * usual:
        found.append(f"runs at {clock} MHz, the others at {usual} MHz")
    for name in _REASONS:
        field = f"Clocks Event Reasons/{name}"
        if mine.get(field) == "Active" and all(card.get(field) != "Active" for card in others):
            found.append(f"is slowed down ({name.rpartition('/')[2]})")
    for name, field, form in (
        ("a power limit of", "GPU Power Readings/Current Power Limit", nvml.watts),
        ("a PCIe link of", "PCI/GPU Link Info/Link Width/Current", "{}x".format),
    ):
        least, usual = mine.number(field), _median(others, field)
        if least is not None and usual and least < _LOWER * usual:
            found.append(f"has {name} {form(least)}, the others {form(usual)}")
    for field in filter(_ERRORS.match, mine.fields):
        if count := mine.number(field):
            found.append(f"has counted {count} errors ({field})")
    strange = [one for one in mine.processes if one.pid not in pids]
    if strange and not any(one.pid not in pids for card in others for one in card.processes):
        found.append(f"is used by process {strange[0].pid}, which is not of the job")
    head = f"its GPU ({mine.get('GPU UUID') or mine.bus})"
    return [f"{head} {', '.join(found)}"] if found else []


def _median(cards: Sequence[Card], field: str) -> int | None:
    values = [value for card in cards if (value := card.number(field)) is not None]
    return statistics.median_low(values) if values else None


def of_cpu(
    before: Mapping[int, CpuState], now: Mapping[int, CpuState], rank: int, bus: str = ""
) -> list[str]:
    """Return clauses on how a rank's CPUs differ from the others'.

    Args:
        before: the state of each rank some time ago.
        now: their state now.
        rank: the rank to compare.
        bus: the PCI address of its GPU; "" if it has none.
    """
    mine, others = now[rank], [state for one, state in now.items() if one != rank]
    found = []
    fewest = min(len(state.cpus) for state in others)
    if 0 < len(mine.cpus) < fewest:
        found.append(f"it may run on {len(mine.cpus)} CPUs, the others on {fewest} or more")
    delays = {one: _delay(before[one], now[one]) for one in now if one in before}
    if rank in delays:
        usual = statistics.median([0.0, *(delay for one, delay in delays.items() if one != rank)])
        if delays[rank] > max(_WAITED, 2 * usual):
            found.append(f"it waited {delays[rank]:.0%} of the time for a CPU, beside other work")
    if mine.swapped_mib > max([_SWAPPED_MIB, *(2 * one.swapped_mib for one in others)]):
        found.append(f"{mine.swapped_mib} MiB of it are in swap")
    node = proc.text(f"/sys/bus/pci/devices/{bus}/numa_node").strip() if bus else ""
    if node.isdigit():
        near = procfs.numbers(proc.text(f"/sys/devices/system/node/node{node}/cpulist"))
        if near and mine.cpus and not near & mine.cpus:
            found.append(f"its GPU is on NUMA node {node}, and none of the CPUs that it may use is")
    return found


def _delay(before: CpuState, now: CpuState) -> float:
    """Return the part of the time between two states in which a rank waited for a CPU."""
    return max(0.0, now.delay_s - before.delay_s) / max(now.at_s - before.at_s, 1e-3)


def of_machine(before: tuple[int, int], now: tuple[int, int]) -> list[str]:
    """Return clauses on what all ranks of this machine share: the time that the host takes.

    Args:
        before: the result of `stolen` some time ago.
        now: its present result.
    """
    ticks = now[1] - before[1]
    share = (now[0] - before[0]) / ticks if ticks > 0 else 0.0
    found = f"the host took {share:.0%} of this machine's CPU time (steal)"
    return [found] if share > _WAITED else []
