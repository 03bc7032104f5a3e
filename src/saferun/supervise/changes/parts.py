"""Find the parts of the machine that caused a run's failures, for the history of parts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.journal import part_history
from saferun.journal.part_history import RunOfParts
from saferun.planning.inputs import RunInputs
from saferun.system import gpus

_BUS = re.compile(r"PCI:([0-9a-f:]{7,20})", re.IGNORECASE)


class RunParts:
    """The parts of one run, and those that failed.

    Args:
        gathered: the inputs of the run's plans.
    """

    def __init__(self, gathered: RunInputs) -> None:
        self._environ, self._run = gathered.environ, gathered.identity.run
        self._gpus = [gpu for gpu in gathered.facts.gpu.gpus if gpu.uuid]
        self._uuids = tuple(gpu.parent or gpu.uuid for gpu in self._gpus)
        self._nodes = gathered.request.options.nodes
        self._failed: dict[str, str] = {}

    def note(self, last: AttemptOutcome, ranks: Collection[int]) -> None:
        """Note a failed attempt if the machine caused the failure.

        Args:
            last: the attempt.
            ranks: ranks that ran on this machine, according to their receipts.
        """
        if last.kind in part_history.OF_HOST:
            self._failed.setdefault("", last.kind)
        elif last.kind in part_history.OF_GPU and self._gpus:
            gpu = self._guilty(last, sorted(ranks))
            if gpu or last.kind != "hang":
                self._failed.setdefault(gpu, last.kind)

    def keep(self, lived_s: float) -> None:
        """Add the run, which has ended, to the history.

        Args:
            lived_s: how long its last attempt lived, in seconds.
        """
        if not self._failed and not os.path.exists(part_history.path(self._environ)):
            return
        host = os.uname().nodename
        ended = RunOfParts(self._run, round(time.time(), 3), host, self._uuids, self._failed)
        part_history.keep(self._environ, ended, lived_s)

    def _guilty(self, last: AttemptOutcome, ranks: list[int]) -> str:
        """Return the UUID of the GPU that failed; "" if unknown.

        NVML has told it, or the line names it by UUID or bus. Else it is the GPU of the rank: ranks
        have their GPUs in order, one each.
        """
        line, known = last.diagnosis.root_line, gpus.addresses()
        bus, told = _BUS.search(line), last.diagnosis.gpu
        for gpu, uuid in zip(self._gpus, self._uuids, strict=True):
            at_bus = bus and known.get(gpu.uuid, "").lower().startswith(bus[1].lower())
            if gpu.uuid in line or at_bus or gpu.uuid == told:
                return uuid
        if bus or told:
            return ""
        if last.root_rank is None or (last.kind == "hang" and len(ranks) < 2):
            alone = len(self._gpus) == 1 and last.kind != "hang"
            return self._uuids[0] if alone else ""
        if last.root_rank in ranks:
            place = ranks.index(last.root_rank)
        else:
            place = last.root_rank if self._nodes == 1 and not ranks else -1
        return self._uuids[place] if 0 <= place < len(self._uuids) else ""
