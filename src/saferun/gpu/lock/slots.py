"""One GPU for each of several workers of a run: the GPU with the fewest runs and workers.

A worker holds a slot of its GPU as a run does (gpu_locks.py), so that slots count the workers of
all runs. A worker with a slot sees no other GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saferun.errors import BusyError
from saferun.gpu.device_names import visible_without
from saferun.gpu.lock import gpu_locks
from saferun.gpu.lock.gpu_locks import Held
from saferun.gpu.lock.lock_owner import Holder
from saferun.model import Gpu
from saferun.settings import LockPolicy


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker's part of a GPU."""

    held: Held
    gpu: Gpu | None  # None: the machine has no GPU


class Slots:
    """The slots on the GPUs that a run sees.

    Args:
        gpus: the run's GPUs, in the job's order.
        policy: the profile's `locks`.
        owner: the holder in the records.
        environ: the environment; SAFERUN_LOCKS, TMPDIR and PATH count.
        world: functions for messages, time and waiting.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        policy: LockPolicy,
        owner: Holder,
        environ: Mapping[str, str],
        world: gpu_locks.Surroundings,
    ) -> None:
        self._gpus, self._policy, self._owner = tuple(gpus), policy, owner
        self._environ, self._world = environ, world
        self._mine = [0] * len(self._gpus)
        self.message = ""  # who has the slots, after a `take` that found none free

    @property
    def count(self) -> int | None:
        """Return the number of workers for which these GPUs have slots; None for no limit."""
        bounded = self._gpus and self._policy.gpus != "off"
        return len(self._gpus) * self._policy.slots if bounded else None

    def describe(self) -> str:
        """Return a text with the number of slots and their GPUs."""
        count = len(self._gpus)
        return f"locks.slots: {self._policy.slots} on {count} GPU{'' if count == 1 else 's'}"

    def take(self) -> Slot | None:
        """Take a free slot on the least used GPU; with `warn`, one that is not free if needed.

        Returns:
            The slot, for `give_back`; None if none is free, and `message` says why.
        """
        order = self._by_load()
        if not order:
            return Slot(self._acquire((), self._policy), None)
        refusing = self._policy._replace(gpus="refuse")
        policies = [self._policy] if self._policy.gpus == "off" else [refusing]
        if self._policy.gpus == "warn":
            policies.append(self._policy)
        self.message = ""
        for policy in policies:
            for place in order:
                try:
                    held = self._acquire((self._gpus[place],), policy)
                except BusyError as busy:
                    self.message = self.message or busy.what
                    continue
                self._mine[place] += 1
                return Slot(held, self._gpus[place])
        return None

    def give_back(self, slot: Slot) -> None:
        """Give back a slot that was taken here."""
        slot.held.close()
        if slot.gpu is not None:
            self._mine[self._gpus.index(slot.gpu)] -= 1

    def visible(self, slot: Slot, exported: str | None) -> str | None:
        """Return the CUDA_VISIBLE_DEVICES that shows only a slot's GPU; None: leave it as it is.

        Args:
            slot: a slot that was taken here.
            exported: the variable's value for the whole run; None if it is not set.
        """
        if slot.gpu is None or len(self._gpus) == 1:
            return None
        return visible_without(exported, [(gpu.uuid, gpu == slot.gpu) for gpu in self._gpus])

    def _by_load(self) -> list[int]:
        others = gpu_locks.load([gpu.uuid for gpu in self._gpus if gpu.uuid], self._environ)
        loads = [
            (max(others.get(gpu.uuid, 0), mine), mine, place)
            for place, (gpu, mine) in enumerate(zip(self._gpus, self._mine, strict=True))
        ]
        return [place for _, _, place in sorted(loads)]

    def _acquire(self, gpus: Sequence[Gpu], policy: LockPolicy) -> Held:
        return gpu_locks.acquire(gpus, policy, self._owner, self._environ, self._world)
