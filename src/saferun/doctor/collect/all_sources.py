"""Collect all facts about this machine from all sources at once, with one deadline.

The sources are nvidia, torchfacts, host, network, kernellog, and the preflight's test of each GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saferun.doctor.collect import host, network, nvidia, together, torchfacts
from saferun.doctor.vitals import Cuda, Files, Host, Measured, Network, Torch
from saferun.gpu import nvml
from saferun.gpu.preflight import preflight, preflight_gate
from saferun.model import NOTE, PROBLEM, Finding, GpuFacts
from saferun.system import command as bounded
from saferun.system import gpus, kernellog
from saferun.system.redact import Masker

FILES_S = 1.5  # milliseconds, unless the driver hangs
NVML_S = 12.0  # nvidia.REPORT_S, plus ALONE_S for the missing GPUs
TRIAL_S = 5.0  # a context takes 0.3 s for each GPU; a hanging driver takes forever
TEST_MIB = 2048  # GPU memory that the test's context and buffers need
TORCH_S = 15.0  # `import torch` takes 2 s warm, and 10 s from a cold disk
DISKS_S = 5.0  # milliseconds, unless a network file system hangs
DEFAULT_PORT = 29500  # torch/distributed/run.py, --master-port
SOURCES = {
    "files": "the driver's files in /proc, /dev and /sys",
    "gpus": "the GPUs",
    "torch": "torch",
    "host": "disks, memory and limits",
    "network": "the network and the host name",
    "log": "the kernel log",
}


@dataclass(frozen=True, slots=True)
class Gpus:
    """All that is known about the GPUs.

    The questions come one after the other, so that our own contexts are not taken for other users'.
    """

    # Its key in the JSON dates from the time when nvidia-smi was asked.
    smi: nvml.NvmlAnswer = field(default_factory=nvml.NvmlAnswer)
    facts: GpuFacts = field(default_factory=GpuFacts)
    test: tuple[Finding, ...] = ()
    cuda: Cuda = field(default_factory=Cuda)
    full: tuple[str, ...] = ()  # UUIDs of GPUs that were not tested: their memory is in use


@dataclass(frozen=True, slots=True)
class Vitals:
    """Every fact that came in time."""

    files: Files = field(default_factory=Files)
    gpus: Gpus = field(default_factory=Gpus)
    torch: Torch = field(default_factory=Torch)
    host: Host = field(default_factory=Host)
    network: Network = field(default_factory=Network)
    log: kernellog.Log = field(default_factory=kernellog.Log)
    measured: Measured | None = None  # with --full


@dataclass(frozen=True, slots=True)
class Collected:
    """The facts, and the sources that gave none."""

    vitals: Vitals
    answered: frozenset[str]  # keys of SOURCES
    late: Mapping[str, float]  # seconds that a source had
    failed: Mapping[str, str]  # a source's exception, on one line


def collect(environ: Mapping[str, str], cwd: str, deadline_s: float) -> Collected:
    """Ask every source.

    Args:
        environ: the environment of the jobs that will run.
        cwd: the directory where they will run.
        deadline_s: seconds from now; later answers are left out.

    Returns:
        The facts; for the GPUs also partial facts from before the deadline.
    """
    end = time.monotonic() + deadline_s
    first = together.ask({"files": nvidia.driver_files}, FILES_S)
    files = first.answers.get("files", Files())
    known: list[Gpus] = []
    questions: dict[str, Callable[[], Any]] = {
        "gpus": lambda: ask_gpus(environ, files, end - 1, known.append),
        "torch": lambda: torchfacts.ask(environ, min(TORCH_S, end - 0.5 - time.monotonic())),
        "host": lambda: host.examine(environ, cwd, DISKS_S),
        "network": lambda: network.examine([rendezvous_port(environ)], Masker(environ, ())),
        "log": lambda: kernellog.read(environ),
    }
    with bounded.questions():
        outcome = together.ask(questions, end - time.monotonic())
    so_far = {"gpus": known[-1]} if known else {}
    facts = {**so_far, **first.answers, **outcome.answers}
    return Collected(
        replace(Vitals(), **facts),
        frozenset(facts),
        {**dict.fromkeys(first.late, FILES_S), **dict.fromkeys(outcome.late, deadline_s)},
        {**first.failed, **outcome.failed},
    )


def rendezvous_port(environ: Mapping[str, str]) -> int:
    """Return the TCP port on which torchrun's workers would meet."""
    for name in ("PET_MASTER_PORT", "MASTER_PORT"):
        value = environ.get(name, "")
        if value.isdecimal() and len(value) <= 5 and 0 < int(value) < 1 << 16:
            return int(value)
    return DEFAULT_PORT


def ask_gpus(
    environ: Mapping[str, str],
    files: Files,
    end: float,
    keep: Callable[[Gpus], object] = lambda known: None,
) -> Gpus:
    """Ask NVML, then test each GPU, then each pair; skip what would only hang.

    Args:
        environ: the job's environment.
        files: the content of the driver's files.
        end: deadline on the monotonic clock, in seconds.
        keep: function that stores the facts known so far.
    """
    smi = nvidia.ask_nvml(environ, tuple(files.gpus), min(end, time.monotonic() + NVML_S))
    known = Gpus(smi)
    keep(known)
    if not (files.version or smi.program or files.wsl):
        return known
    seconds = min(3.0, max(0.5, end - time.monotonic()))
    known = Gpus(smi, gpus.detect(environ, timeout_s=seconds))
    keep(known)
    hung = smi.status is None and bool(smi.silent or not smi.report.cards)
    if hung or not known.facts.gpus:
        return known
    return _try_gpus(replace(known, full=_without_space(smi)), environ, end, keep)


def _without_space(smi: nvml.NvmlAnswer) -> tuple[str, ...]:
    """Return the UUIDs of GPUs without space for our context: a test would disturb their jobs."""
    full = []
    for card in smi.report.cards:
        unused = card.number("FB Memory Usage/Free")
        if unused is not None and unused < TEST_MIB and card.get("MIG Mode/Current") != "Enabled":
            full.append(card.get("GPU UUID"))
    return tuple(full)


def _try_gpus(
    known: Gpus, environ: Mapping[str, str], end: float, keep: Callable[[Gpus], object]
) -> Gpus:
    """Test each GPU that has space, and each pair of GPUs if all are healthy."""
    tried = [found for found in known.facts.gpus if found.uuid not in known.full]
    if known.full:
        tried = [found for found in tried if found.uuid]
        environ = {**environ, "CUDA_VISIBLE_DEVICES": ",".join(found.uuid for found in tried)}
    if tried:
        facts = known.facts._replace(gpus=tuple(tried))
        known = replace(known, test=_test(environ, facts, end - time.monotonic()))
        keep(known)
    left = end - time.monotonic()
    if left < 1 or len(tried) < 2 or any(found.level == PROBLEM for found in known.test):
        return known
    return replace(known, cuda=nvidia.ask_cuda(environ, min(nvidia.PEERS_S, left)))


def _test(environ: Mapping[str, str], facts: GpuFacts, timeout_s: float) -> tuple[Finding, ...]:
    """Run the preflight of a launch: make a context on every GPU, write memory and read it back."""
    if timeout_s < 1:
        return ()
    try:
        with preflight.PreflightTest(environ) as test:
            return preflight_gate.examine(test, environ, facts, min(TRIAL_S, timeout_s)).findings
    except OSError as error:
        return (Finding(NOTE, "GPUs", f"the GPUs could not be tested: {error.strerror}"),)
