"""The history of parts: GPUs and hosts whose failures ended a user's last runs.

A bad card fails repeatedly, in any job that gets it. A run is stored if one of its parts failed; a
successful run is stored if one of its parts failed before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.errors import UsageError
from saferun.journal.history_file import HistoryFile
from saferun.model import NOTE, Finding, Gpu

LAST, BAD = 5, 2  # a part that fails in two of its last five runs is named
COUNTS_S = 60.0  # a shorter successful run does not count: a typo proves nothing about a GPU
# Kinds of failures that the machine causes: the rank's GPU, if known, or the host. A hang counts if
# a single rank of several is elsewhere.
OF_GPU = (
    *("gpu-ecc-uncorrectable", "gpu-lost", "gpu-link-failed", "gpu-p2p-corrupt"),
    *("cuda-launch-failure", "cuda-launch-timeout", "cuda-illegal-access-sporadic"),
    *("cuda-init-unknown-error", "hang"),
)
OF_HOST = ("nccl-ib-link-down", "fabric-not-ready", "nvml-version-mismatch")


class RunOfParts(NamedTuple):
    """One run on one host."""

    run: str
    at: float  # its end, in seconds since the epoch
    host: str
    gpus: tuple[str, ...]  # UUIDs of the GPUs that it saw
    failed: Mapping[str, str]  # UUID -> kind of the failure; "" for the host


class Failure(NamedTuple):
    """A failure of a part."""

    at: float  # seconds since the epoch
    run: str
    kind: str


class Part(NamedTuple):
    """A GPU or a host that has failed."""

    gpu: str  # UUID; "" for the host itself
    host: str
    failures: tuple[Failure, ...]  # failures in its last runs, the oldest first
    runs: int  # number of its last runs, at most LAST

    @property
    def name(self) -> str:
        """Return the GPU's UUID, or the host's name."""
        return self.gpu or self.host

    @property
    def is_named(self) -> bool:
        """Return whether it has failed often enough to be named before a job begins."""
        return len(self.failures) >= BAD


Runs = tuple[RunOfParts, ...]


def _run(item: Mapping[str, Any]) -> RunOfParts:
    gpus = tuple(str(gpu) for gpu in item["gpus"])
    failed = {str(gpu): str(kind) for gpu, kind in item["failed"].items()}
    return RunOfParts(str(item["run"]), float(item["at"]), str(item["host"]), gpus, failed)


HISTORY = HistoryFile("parts", "runs", _run)
path, load, change = HISTORY.path, HISTORY.load, HISTORY.change


def keep(environ: Mapping[str, str], ended: RunOfParts, lived_s: float) -> None:
    """Add an ended run if it proves something about its parts.

    Args:
        environ: variables that give the history's directory.
        ended: the run.
        lived_s: how long its last attempt lived, in seconds.

    Raises:
        OSError: the run cannot be added.
    """
    if not ended.failed and (lived_s < COUNTS_S or not of(load(environ), ended.host, ended.gpus)):
        return
    change(environ, lambda known: (*known, ended))


def of(known: Iterable[RunOfParts], host: str, gpus: Collection[str]) -> list[Part]:
    """Return the parts of a machine that failed in their last runs, GPUs first.

    The failures of a GPU that is named do not count for its host, too.

    Args:
        known: the history.
        host: the machine's name.
        gpus: UUIDs of its GPUs.
    """
    here = sorted((run for run in known if run.host == host), key=lambda run: run.at)
    known_gpus = dict.fromkeys((*gpus, *(gpu for run in here for gpu in run.gpus)))
    found = [_part(gpu, host, [r for r in here if gpu in r.gpus], {gpu}) for gpu in known_gpus]
    named = {part.gpu for part in found if part.is_named}
    others = {gpu for run in here for gpu in run.failed} - named
    asked = [part for part in found if part.gpu in gpus]
    return [part for part in (*asked, _part("", host, here, others)) if part.failures]


def _part(gpu: str, host: str, runs: Sequence[RunOfParts], guilty: Collection[str]) -> Part:
    last = runs[-LAST:]
    failed = ((run, next((run.failed[g] for g in run.failed if g in guilty), "")) for run in last)
    failures = tuple(Failure(run.at, run.run, kind) for run, kind in failed if kind)
    return Part(gpu, host, failures, len(last))


def sentence(part: Part, number: int | None = None) -> str:
    """Return the message about a part before a job begins.

    Args:
        part: a part that is named.
        number: the GPU's index in nvidia-smi; None if unknown.
    """
    times = [
        f"{one.kind} on {time.strftime('%Y-%m-%d', time.localtime(one.at))} (run {one.run})"
        for one in part.failures
    ]
    index = "" if number is None else f" {number}"
    name = f"GPU{index} ({part.gpu})" if part.gpu else f"the host {part.host}"
    often = f"{len(part.failures)} of its last {part.runs} runs"
    return f"{name} failed in {often}: {', '.join(times)}"


def findings(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Finding]:
    """Return a note for each part of this machine that has failed repeatedly.

    Args:
        environ: variables that give the history's directory.
        gpus: the GPUs that a job would see.
    """
    if not os.path.exists(path(environ)):
        return []
    numbers = {gpu.parent or gpu.uuid: gpu.number for gpu in gpus if gpu.uuid}
    parts = of(load(environ), os.uname().nodename, [*numbers])
    fix = "have it looked at, or forget it: `saferun runs parts clear {}`"
    return [
        Finding(NOTE, "history", sentence(one, numbers.get(one.gpu)), "", fix.format(one.name))
        for one in parts
        if one.is_named
    ]


def listed(known: Runs) -> list[Part]:
    """Return the parts of all machines that have failed in their last runs."""
    gpus = {run.host: dict.fromkeys(gpu for one in known for gpu in one.gpus) for run in known}
    return [part for host, seen in sorted(gpus.items()) for part in of(known, host, [*seen])]


def clear(environ: Mapping[str, str], name: str | None) -> Runs:
    """Forget the failures of a GPU or a host, or all of them; return the runs that had any.

    Args:
        environ: variables that give the history's directory.
        name: the GPU's UUID or its beginning, or the host's name; None for all.

    Raises:
        UsageError: the history has nothing about it.
        UnavailableError: the history cannot be changed.
    """

    def is_meant(run: RunOfParts, gpu: str) -> bool:
        return name in (None, run.host) or bool(gpu and name and gpu.startswith(name))

    def without(run: RunOfParts) -> RunOfParts:
        failed = {gpu: kind for gpu, kind in run.failed.items() if not is_meant(run, gpu)}
        return run._replace(failed=failed)

    before = HISTORY.forget(environ, lambda known: tuple(without(run) for run in known))
    gone = tuple(run for run in before if without(run) != run)
    if name is not None and not gone:
        fix = "`saferun runs parts list` has those that there are"
        raise UsageError(f"no failure in the history is of `{name}`", fix=fix)
    return gone
