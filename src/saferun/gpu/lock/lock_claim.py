"""The lock files that one attempt to lock has taken, and those that others hold."""

from __future__ import annotations

import os

from saferun.gpu.device_names import Device
from saferun.gpu.lock.lock_dir import LockDirectory
from saferun.gpu.lock.lock_owner import OwnerRecord, describe_holder, read_all, unlink
from saferun.system import procfs
from saferun.system.printable import printable

SLOTS = 64  # most runs on one GPU that can be counted


class Claim:
    """The lock files that one attempt has taken, and its conflicts."""

    def __init__(self, devices: tuple[Device, ...], slots: int, records: list[OwnerRecord]) -> None:
        self.devices = devices
        self.slots = slots
        self.records = records
        self.files: dict[str, int] = {}  # name -> descriptor
        self.clashes: dict[str, list[str]] = {}  # device -> files that others hold
        self.others: dict[str, int] = {}  # device -> slots that others hold

    @classmethod
    def make(cls, place: LockDirectory, devices: tuple[Device, ...], slots: int) -> Claim:
        """Take the free locks of all devices, in sorted order, and note the others.

        Args:
            place: the lock directory.
            devices: the devices to take, sorted.
            slots: number of runs that may share each device.
        """
        names = place.names()
        claim = cls(devices, slots, list(read_all(place, names)))
        try:
            claim._sweep(place)
            for device in devices:
                met = claim._device(place, device, names)
                if device.parent:
                    met += claim._parent(place, device.parent, names)
                if met:
                    claim.clashes[device.name] = met
        except BaseException:
            claim.close()
            raise
        return claim

    def _device(self, place: LockDirectory, device: Device, names: frozenset[str]) -> list[str]:
        name, met = device.name, []
        if not self._take(place, f"{name}.lock", alone=self.slots == 1):
            met.append(f"{name}.lock")
            if self.slots == 1:
                self._take(place, f"{name}.lock", alone=False)  # whoever resets it must see us
        others = [slot for slot in slots_of(name, names) if place.is_held(slot, shared=True)]
        self.others[name] = len(others)
        signed = [
            r.slots
            for r in self.records
            if r.alive and name in r.devices and any(slot in r.files for slot in others)
        ]
        if len(others) >= min([self.slots, SLOTS, *signed]):
            met += others
        for slot in (f"{name}.slot{k}" for k in range(SLOTS)):
            if slot not in others and self._take(place, slot, alone=True):
                break
        slices = f"{name}.slices"
        return [*met, slices] if slices in names and place.is_held(slices, shared=False) else met

    def _parent(self, place: LockDirectory, parent: str, names: frozenset[str]) -> list[str]:
        """Share the GPU of a slice with other slices, but not with a run on the whole GPU."""
        met = [slot for slot in slots_of(parent, names) if place.is_held(slot, shared=True)]
        self._take(place, f"{parent}.slices", alone=False)
        if not self._take(place, f"{parent}.lock", alone=False):
            met.append(f"{parent}.lock")
        return met

    def _take(self, place: LockDirectory, name: str, *, alone: bool) -> bool:
        if name in self.files:
            return True  # the parent of two of our slices
        descriptor = place.take(name, alone=alone)
        if descriptor is not None:
            self.files[name] = descriptor
        return descriptor is not None

    def _sweep(self, place: LockDirectory) -> None:
        """Remove our own user's records (root: all) whose process has ended and left no lock."""
        for record in self.records:
            if not record.alive and os.geteuid() in (record.uid, 0):
                slots = [f for f in record.files if ".slot" in f]
                if not any(place.is_held(slot, shared=True) for slot in slots):
                    unlink(place, record.file)

    def holders(self, place: LockDirectory) -> list[str]:
        """Return the holders of conflicting locks: by record, or else from the kernel."""
        files = {file for met in self.clashes.values() for file in met}
        named = [r for r in self.records if r.alive and files & set(r.files)]
        signed = {file for record in named for file in record.files}
        named += [r for r in self.records if not r.alive and (files - signed) & set(r.files)]
        signed.update(file for record in named for file in record.files)
        pids = {pid for file in files - signed for pid in place.locked_by(file)}
        unsigned = [f"pid {pid} ({printable(procfs.comm(pid))})" for pid in sorted(pids)]
        return list(dict.fromkeys(map(describe_holder, named))) + unsigned or [
            "a process that has left no record"
        ]

    def close(self) -> None:
        """Close every descriptor; the kernel frees locks that no other process has inherited."""
        while self.files:
            os.close(self.files.popitem()[1])


def slots_of(name: str, names: frozenset[str]) -> list[str]:
    """Return a device's slot files, from the names in the directory."""
    return [slot for k in range(SLOTS) if (slot := f"{name}.slot{k}") in names]
