"""The machine's state after a failed attempt whose output does not tell the cause.

Each source is asked only if those before it told nothing: error files and counters cost nothing,
the kernel's log milliseconds, NVML up to seconds. Missing sources raise nothing.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from saferun.diagnosis.deciding import known_from
from saferun.diagnosis.evidence import Evidence, Observation
from saferun.diagnosis.process_end import signal_of
from saferun.gpu import nvml
from saferun.model import Gpu
from saferun.system import gpus, kernellog

NVML_S = 3.0  # time for NVML to answer
FULL_BYTES = 1 << 20  # a disk with fewer free bytes counts as full
_BUS = re.compile(r"\(PCI:([0-9A-Fa-f:]{7,13})")
_KMSG = re.compile(r"\A\d{1,6},\d{1,20},\d{1,20},[^;]{0,80};")
_LINK = "p2p"  # a recovery action with it drains the links, not the GPU


class Scene(NamedTuple):
    """Where an attempt ran."""

    environ: Mapping[str, str]  # the job's environment
    gpus: tuple[Gpu, ...]
    began_s: float  # seconds since the epoch
    folders: tuple[str, ...]  # folders that it writes to
    signal: int | None = None  # the signal that ended the launcher


def observed(seen: Evidence, scene: Scene) -> Iterator[Observation]:
    """Yield the machine's observations, the strongest first; each is made when it is requested.

    Args:
        seen: what is known about the attempt.
        scene: where the attempt ran.
    """
    yield from _kernels_log(scene)
    if seen.oom_kills:
        text = known_from.kills(seen.oom_kills)
        yield Observation("kernel's count of kills", text, "host-oom-killed")
    yield from full_disks(scene.folders)
    yield from _gpus(scene)
    yield from _signal(seen, scene)
    for failure in seen.failures:
        message = failure.message.strip()
        if " " in message.partition(":")[0]:  # a sentence; `classify` has read exceptions
            source = "error file" if failure.rank is None else f"error file of rank {failure.rank}"
            yield Observation(source, message.splitlines()[0], "user-exception")
    # torchrun, which returns 1 for every failure, is never silent.
    silent = not any(line.text.strip() for line in seen.log.lines)
    if seen.exited or (silent and seen.exit_code == 1):
        yield Observation(f"exit status {seen.exit_code}", "", "child-failed-no-root")


def _kernels_log(scene: Scene) -> Iterator[Observation]:
    """Yield the driver's lines in the kernel's log about the job's GPUs during the attempt."""
    if not scene.gpus:
        return

    known = gpus.addresses()
    buses = {known[gpu.uuid].lower() for gpu in scene.gpus if gpu.uuid in known}
    for line in kernellog.read(scene.environ, since_s=scene.began_s).lines:
        named = _BUS.search(line)
        elsewhere = named and not any(bus.startswith(named[1].lower()) for bus in buses)
        if not (buses and elsewhere):
            yield Observation("kernel's log", _KMSG.sub("", line))


def full_disks(folders: Iterable[str]) -> Iterator[Observation]:
    """Yield the full disks among those of some folders, each once."""
    seen: set[int] = set()
    for folder in folders:
        try:
            device, disk = os.stat(folder).st_dev, os.statvfs(folder)
        except OSError:
            continue
        if device in seen or disk.f_flag & os.ST_RDONLY or not disk.f_blocks:
            continue
        seen.add(device)
        blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
        if blocks * disk.f_frsize < FULL_BYTES:
            what = f"{blocks * disk.f_frsize >> 10} KiB"
        elif disk.f_files and not disk.f_favail:
            what = "no inodes"
        else:
            continue
        yield Observation("disk", f"the disk of {folder} is full: {what} free", "disk-full")


def _gpus(scene: Scene) -> Iterator[Observation]:
    """Yield NVML's errors about the job's GPUs."""
    if not scene.gpus:
        return

    answer = nvml.ask(scene.environ, NVML_S)
    if answer.trouble:
        yield Observation("NVML", answer.trouble)
    for gpu in scene.gpus:
        name = f"GPU {gpu.uuid if gpu.number is None else gpu.number}"
        card = answer.report.card(gpu.uuid)
        if card is None:
            if answer.report.cards and gpu.uuid.startswith("GPU-"):
                yield Observation("NVML", f"{name} is not listed any more", "gpu-lost", gpu.uuid)
            continue
        for field in card.sick:
            yield Observation("NVML", f"{name}: {field}: {card.fields[field]}", gpu=gpu.uuid)
        if action := card.get("GPU Recovery Action"):
            kind = "gpu-link-failed" if _LINK in action.lower() else "gpu-lost"
            yield Observation("NVML", f"{name}: GPU Recovery Action: {action}", kind, gpu.uuid)


def _signal(seen: Evidence, scene: Scene) -> Iterator[Observation]:
    """Yield the signal that ended the launcher, or the script below it, as a shell reports it."""
    number = scene.signal or signal_of(seen.exit_code or 0)
    try:
        name = signal.Signals(number).name
    except ValueError:
        return
    gone = number == signal.SIGPIPE and seen.reader_gone
    kind = "output-reader-gone" if gone else "ended-by-signal"
    yield Observation(f"exit status {seen.exit_code}", f"ended by {name}", kind)
