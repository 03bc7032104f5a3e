"""Whether a GPU has the memory that one more slot needs, or else which processes hold it.

A new slot uses no memory yet. So each held slot counts with the memory that a slot needs or with
the used memory, whichever leaves less. Values that the driver does not report set no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from saferun.gpu import nvml
from saferun.gpu.device_names import device_name
from saferun.gpu.lock.lock_claim import Claim
from saferun.gpu.lock.lock_owner import OwnerRecord, user_name
from saferun.gpu.nvml import Card, Process
from saferun.system import procfs
from saferun.system.printable import printable

NVML_S = 5.0  # longest time for NVML
FRESH_S = 2.0  # after that NVML is asked again
_MIB = 1024  # MiB in a GiB
_SHOWN = 3  # most processes that a message names


class SlotMemory:
    """The GPUs' free memory from the view of slots.

    Args:
        need_gib: memory that one slot needs (`locks.slot_memory_gib`).
        environ: the environment; LD_LIBRARY_PATH finds NVML.
        say: function that takes a line if a GPU's memory is unknown.
        clock: function that returns seconds.
    """

    def __init__(
        self,
        need_gib: float,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._need_gib, self._environ, self._say, self._clock = need_gib, environ, say, clock
        self._cards: dict[str, Card] = {}  # device name -> card
        self._looked_at: float | None = None
        self._holders: dict[str, str] = {}  # device name -> holders when memory was first short
        self._unknown: set[str] = set()  # GPUs that were reported as unknown

    def refresh(self) -> None:
        """Ask NVML, unless it was asked recently; this normally takes 100 ms."""
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < FRESH_S:
            return
        cards = nvml.ask(self._environ, NVML_S).report.cards
        self._cards = {device_name(card.get("GPU UUID")): card for card in cards}
        self._looked_at = self._clock()

    def shortage(self, claim: Claim) -> str:
        """Return the clause that memory is short on a claim's GPU, and who holds it; or ""."""
        for device in claim.devices:
            card = self._cards.get(device.name)
            total = card.number("FB Memory Usage/Total") if card else None
            free = card.number("FB Memory Usage/Free") if card else None
            if card is None or total is None or free is None:
                self._say_unknown(device.name)
                continue
            others = claim.others.get(device.name, 0)
            left = (total - others * self._need_gib * _MIB) / _MIB
            if left < self._need_gib:
                given = f"{others} slots of {self._need_gib:g} GiB each are held"
                return f"{device.name} has {total / _MIB:.1f} GiB, of which {given}"
            if free / _MIB < self._need_gib:
                need = f"a slot needs {self._need_gib:g} GiB (locks.slot_memory_gib)"
                whose = self._whose(device.name, card.processes, claim.records)
                return f"{device.name} has {free / _MIB:.1f} GiB free, and {need}; {whose}"
        return ""

    def _whose(
        self, name: str, processes: Sequence[Process], records: Sequence[OwnerRecord]
    ) -> str:
        """Return the holders of a GPU's memory at the time when it was first short."""
        if name not in self._holders:
            self._holders[name] = _holders(processes, records)
        return self._holders[name]

    def _say_unknown(self, name: str) -> None:
        if name not in self._unknown:
            self._unknown.add(name)
            self._say(f"the free memory of {name} is not known; locks.slots alone bounds its slots")


def _holders(processes: Sequence[Process], records: Sequence[OwnerRecord]) -> str:
    if not processes:
        return "no process is seen: it may be in another container"
    most = sorted(processes, key=lambda process: process.used_mib or 0, reverse=True)
    named = ", ".join(_holder(process, records) for process in most[:_SHOWN])
    more = f" and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
    return f"the rest is held by {named}{more}"


def _holder(process: Process, records: Sequence[OwnerRecord]) -> str:
    """Return pid, user, program, memory and run of a process."""
    uids = procfs.uids(process.pid)
    user = f" of user {user_name(min(uids))}" if uids else ""
    used = "" if process.used_mib is None else f", {process.used_mib / _MIB:.1f} GiB"
    above = {pid for pid, _ in procfs.lineage(process.pid)}
    runs = (one.holder.run for one in records if one.alive and one.holder.pid in above)
    run = next((f", run {name}" for name in runs if name), "")
    name = printable(process.name or procfs.comm(process.pid))
    return f"pid {process.pid}{user} ({name}{used}{run})"
