"""`saferun doctor`: collect the machine's facts, all at once and bounded, and have them judged.

    collect (nvidia, torchfacts, host, network, kernellog, the preflight's trial)
        -> vitals -> judge (checks_*, xid, audit) -> findings -> doctor_page

Whatever hangs or fails becomes a finding; nothing here raises for what the machine does, and all
is over within 20 s (`--full` aside).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from saferun.audit import report as audit
from saferun.doctor import (
    checks_driver,
    checks_gpu,
    checks_host,
    checks_links,
    checks_network,
    checks_speed,
    host,
    kernellog,
    network,
    nvidia,
    together,
    torchfacts,
    xid,
)
from saferun.doctor.vitals import Cuda, Files, Host, Measured, Network, Smi, Torch
from saferun.gpu import nvidia_smi
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Facts, Finding, GpuFacts
from saferun.system import command as bounded
from saferun.system import gpus as gpu
from saferun.system.redact import Masker

DEADLINE_S = 17.5  # the promise is 20 s; starting and printing take the rest
FILES_S = 1.5  # milliseconds, unless the driver hangs
SMI_S = 12.0
TRIAL_S = 5.0
ROOM_MIB = 2048  # of memory, for the trial's context and buffers
TORCH_S = 15.0  # `import torch` takes 2 s warm, and 10 s from a cold disk
DISKS_S = 5.0
DEFAULT_PORT = 29500  # torch/distributed/run.py, --master-port


class Gpus(NamedTuple):
    """All that was asked of the GPUs, one after the other: our own contexts are no strangers."""

    smi: Smi = Smi()
    facts: GpuFacts = GpuFacts()
    trial: tuple[Finding, ...] = ()
    cuda: Cuda = Cuda()
    full: tuple[str, ...] = ()  # UUIDs of those that were not tried: their memory is taken


class Vitals(NamedTuple):
    """Every fact, as far as it came in time."""

    files: Files = Files()
    gpus: Gpus = Gpus()
    torch: Torch = Torch()
    host: Host = Host()
    network: Network = Network()
    log: kernellog.Log = kernellog.Log()
    measured: Measured | None = None  # by --full


class Examination(NamedTuple):
    """What was found, and the facts behind it."""

    findings: tuple[Finding, ...]
    vitals: Vitals


def examine(
    environ: Mapping[str, str], cwd: str, *, recover: bool = False, deadline_s: float = DEADLINE_S
) -> Examination:
    """Collect and judge.

    Args:
        environ: of the jobs that will run.
        cwd: where they will run.
        recover: bring the GPUs back into use first, as far as the profile allows; not bounded by
            the deadline.
        deadline_s: what has not answered then is left out, and named.

    Raises:
        SaferunError: a wrong setting of ours in the environment (with `recover` only).
    """
    done = _recover(environ, cwd) if recover else ()
    answers, late = _ask_all(environ, cwd, deadline_s)
    vitals = Vitals()._replace(**answers)
    found = [*done, *late, *judge(vitals, environ, frozenset(answers))]
    masker = Masker(environ, ())
    said = {_same(finding): masked(finding, masker) for finding in found}
    return Examination(tuple(said.values()), vitals)


def _same(finding: Finding) -> Finding:
    """Return what makes a finding the same as another: recovery tries the GPUs too."""
    return finding._replace(detail="") if finding.level == OK else finding


def _ask_all(
    environ: Mapping[str, str], cwd: str, deadline_s: float
) -> tuple[dict[str, Any], list[Finding]]:
    """Return the answers by name, and a finding for each question that has none."""
    end = time.monotonic() + deadline_s
    first = together.ask({"files": nvidia.driver_files}, FILES_S)
    files = first.answers.get("files", Files())
    ports = [_port(environ)]
    known: list[Gpus] = []
    questions: dict[str, Callable[[], Any]] = {
        "gpus": lambda: ask_gpus(environ, files, end - 1, known.append),
        "torch": lambda: torchfacts.ask(environ, min(TORCH_S, end - 0.5 - time.monotonic())),
        "host": lambda: host.look(environ, cwd, DISKS_S),
        "network": lambda: network.look(ports, Masker(environ, ())),
        "log": lambda: kernellog.read(environ),
    }
    with bounded.questions():
        outcome = together.ask(questions, end - time.monotonic())
    so_far = {"gpus": known[-1]} if known else {}
    late = [*_unanswered(first, FILES_S), *_unanswered(outcome, deadline_s)]
    return {**so_far, **first.answers, **outcome.answers}, late


def _recover(environ: Mapping[str, str], cwd: str) -> tuple[Finding, ...]:
    """Do what `recover_cuda_context` does, with the settings that a launch here would have."""
    from saferun.gpu import preflight_gate
    from saferun.plan import inputs
    from saferun.plan.request import read
    from saferun.system import paths

    plan = inputs.show(read(["SCRIPT"], environ), environ, cwd)
    if not plan.gpus.gpus:
        return (Finding(NOTE, "recovery", "no GPU that a job would see", "", ""),)
    reset = plan.settings.recover.gpu_reset
    place = paths.runs_dir(None, environ, cwd)
    return preflight_gate.recover_cuda_context(environ, plan.gpus, reset=reset, runs=place)


def measure(known: Examination, environ: Mapping[str, str]) -> Examination:
    """Add what the GPUs can do (`--full`): under 60 s, and with every GPU at full load."""
    from saferun.doctor import full

    gpus = known.vitals.gpus
    if not gpus.facts.gpus:
        words = "no GPU that a job would see: nothing was measured"
        return known._replace(findings=(*known.findings, Finding(NOTE, "speed", words, "", "")))
    measured = full.measure(environ, len(gpus.facts.gpus))
    numbers = nvidia_smi.ordered(gpus.smi.report.cards, gpus.smi.report.lost)
    linked = any(up for up, _ in gpus.smi.links.values())
    found = checks_speed.judge(measured, numbers, linked)
    masker = Masker(environ, ())
    return Examination(
        (*known.findings, *(masked(finding, masker) for finding in found)),
        known.vitals._replace(measured=measured),
    )


def _port(environ: Mapping[str, str]) -> int:
    for name in ("PET_MASTER_PORT", "MASTER_PORT"):
        given = environ.get(name, "")
        if given.isdecimal() and len(given) <= 5 and 0 < int(given) < 1 << 16:
            return int(given)
    return DEFAULT_PORT


def ask_gpus(
    environ: Mapping[str, str],
    files: Files,
    end: float,
    keep: Callable[[Gpus], object] = lambda known: None,
) -> Gpus:
    """Ask nvidia-smi, then try each GPU, then each pair; what would only hang is not asked.

    Args:
        environ: of the job.
        files: the driver's.
        end: on the monotonic clock.
        keep: takes what is known so far, whatever comes later.
    """
    told = nvidia.ask_smi(environ, tuple(files.gpus), min(end, time.monotonic() + SMI_S))
    keep(Gpus(told))
    if not (files.version or told.program or files.wsl):
        return Gpus(told)
    left = end - time.monotonic()
    seconds = min(3.0, max(0.5, left))
    known = Gpus(told, gpu.detect(environ, timeout_s=seconds, run=nvidia.listing))
    keep(known)
    hung = told.status is None and bool(told.silent or not told.report.cards)
    if hung or not known.facts.gpus:
        return known
    known = _with_room(known)
    tried = [found for found in known.facts.gpus if found.uuid not in known.full]
    if known.full:
        tried = [found for found in tried if found.uuid]
        environ = {**environ, "CUDA_VISIBLE_DEVICES": ",".join(found.uuid for found in tried)}
    if tried:
        facts = known.facts._replace(gpus=tuple(tried))
        known = known._replace(trial=_trial(environ, facts, end - time.monotonic()))
        keep(known)
    left = end - time.monotonic()
    if left < 1 or len(tried) < 2 or any(found.level == PROBLEM for found in known.trial):
        return known
    return known._replace(cuda=nvidia.ask_cuda(environ, min(nvidia.PEERS_S, left)))


def _with_room(known: Gpus) -> Gpus:
    """Name the GPUs that have no room for our context: trying them would disturb who fills them."""
    full = []
    for card in known.smi.report.cards:
        unused = nvidia_smi.number(card.get("FB Memory Usage/Free"))
        if unused is not None and unused < ROOM_MIB and card.get("MIG Mode/Current") != "Enabled":
            full.append(card.get("GPU UUID"))
    return known._replace(full=tuple(full))


def _trial(environ: Mapping[str, str], facts: GpuFacts, timeout_s: float) -> tuple[Finding, ...]:
    """Make a context on every GPU, write memory and read it back: the preflight of a launch."""
    from saferun.gpu import preflight, preflight_gate

    if timeout_s < 1:
        return ()
    try:
        with preflight.Trial(environ) as trial:
            allowed = min(TRIAL_S, timeout_s)
            return preflight_gate.examine(trial, environ, facts, allowed).findings
    except OSError as error:
        words = f"the GPUs could not be tried: {error.strerror}"
        return (Finding(NOTE, "GPUs", words, "", ""),)


_ASKED = {
    "files": "the driver's files in /proc, /dev and /sys",
    "gpus": "the GPUs",
    "torch": "torch",
    "host": "disks, memory and limits",
    "network": "the network and the host name",
    "log": "the kernel log",
}


def _unanswered(outcome: together.Outcome, deadline_s: float) -> Iterator[Finding]:
    """Questions without an answer: the machine hangs there, or the fault is ours."""
    for name in outcome.late:
        words = f"{_ASKED[name]}: no answer within {deadline_s:g} s"
        yield Finding(
            PROBLEM, "doctor", words, "", "what is asked there hangs, and would for a job"
        )
    for name, error in outcome.failed.items():
        yield _our_fault(f"{_ASKED[name]}: could not be asked", error)


def judge(
    vitals: Vitals, environ: Mapping[str, str], answered: frozenset[str] = frozenset(_ASKED)
) -> list[Finding]:
    """Judge the facts; those that did not come are not judged.

    Args:
        vitals: the facts.
        environ: of the jobs.
        answered: names of the questions that were answered.
    """
    found: list[Finding] = []
    for needs, check in _checks(vitals, environ):
        if needs <= answered:
            found += _guarded(check)
    return found


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """One check that fails takes no other one with it."""
    try:
        return list(check())
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return [_our_fault("a check failed", words)]


def _our_fault(what: str, error: str) -> Finding:
    words = f"{what}, a fault of saferun's own"
    return Finding(NOTE, "doctor", words, error[:300], "please report it with these words")


def _checks(
    v: Vitals, environ: Mapping[str, str]
) -> Iterator[tuple[set[str], Callable[[], Iterable[Finding]]]]:
    """Yield every check with the questions that it needs answered."""
    told, cuda = v.gpus.smi, v.gpus.cuda
    present = max(len(told.report.cards), len(v.gpus.facts.gpus))
    mine = [found.uuid for found in v.gpus.facts.gpus]
    rdma_off = environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    yield {"files", "gpus"}, lambda: checks_driver.presence(v.files, told, cuda)
    yield {"files"}, lambda: checks_driver.nodes(v.files)
    yield {"files", "gpus", "torch"}, lambda: _versions(v)
    yield {"gpus", "torch"}, lambda: checks_driver.architectures(told, cuda, v.torch)
    yield {"files", "gpus"}, lambda: checks_gpu.judge(told, v.files, mine)
    yield {"gpus"}, lambda: v.gpus.trial
    yield {"gpus"}, lambda: _untried(v.gpus)
    yield {"gpus"}, lambda: checks_links.peers(told, cuda)
    yield {"gpus"}, lambda: checks_links.nvlinks(told)
    yield {"files", "gpus", "log"}, lambda: _events(v)
    yield (
        {"network", "host"},
        lambda: checks_links.infiniband(v.network.infiniband, v.host.limits, rdma_off),
    )
    yield {"network"}, lambda: checks_network.nccl(v.network, environ)
    yield {"network"}, lambda: checks_network.gloo(v.network, environ)
    yield {"network"}, lambda: checks_network.name_service(v.network)
    yield {"network"}, lambda: checks_network.ports(v.network)
    yield {"host"}, lambda: checks_host.disks(v.host.disks)
    yield {"host"}, lambda: checks_host.shared_memory(v.host.memory)
    yield {"host"}, lambda: checks_host.memory(v.host.memory)
    yield {"host", "gpus"}, lambda: checks_host.processors(v.host.memory, len(mine))
    yield {"host"}, lambda: checks_host.limits(v.host.limits)
    yield {"host"}, lambda: checks_host.clock(v.host.clock)
    yield (
        {"host", "torch", "gpus"},
        lambda: checks_host.compilers(v.host.tools, v.torch, environ, bool(present)),
    )
    yield {"gpus"}, lambda: checks_host.scheduler(environ, v.gpus.facts, present)
    where = Facts(gpu=v.gpus.facts, torch=v.torch.torch or None)
    yield set(), lambda: audit.findings(environ, where)


def _versions(v: Vitals) -> Iterator[Finding]:
    return checks_driver.versions(v.files, v.gpus.smi, v.gpus.cuda, v.torch)


def _untried(gpus: Gpus) -> Iterator[Finding]:
    numbers = nvidia_smi.ordered(gpus.smi.report.cards, gpus.smi.report.lost)
    for card in gpus.smi.report.cards:
        if card.get("GPU UUID") in gpus.full:
            words = f"not tried: {card.get('FB Memory Usage/Free')} of its memory are free"
            yield Finding(NOTE, f"GPU {numbers[card.bus]}", words, "", "")


def _events(vitals: Vitals) -> list[Finding]:
    """The driver's events in the kernel log, where there is a driver."""
    report = vitals.gpus.smi.report
    if not (vitals.files.version or report.cards or report.lost):
        return []
    if not vitals.log.source:
        fix = "`sudo dmesg | grep -i xid` on the host"
        words = "the kernel's log may not be read here: Xid events stay unseen"
        return [Finding(NOTE, "kernel log", words, vitals.log.trouble, fix)]
    numbers = nvidia_smi.ordered(report.cards, report.lost)
    well = [card.bus for card in report.cards if checks_gpu.healthy_by_driver(card)]
    known = xid.catalogue(loader.load_xids())
    return xid.judge(tuple(xid.parse(vitals.log.lines)), known, numbers, well)


def masked(finding: Finding, masker: Masker) -> Finding:
    """Return a finding without secrets (it may quote command lines and a program's words).

    Nor anything that a terminal would obey or an encoding refuse.
    """
    return Finding(finding.level, *(_printable(masker.text(text)) for text in finding[1:]))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def status(findings: tuple[Finding, ...]) -> int:
    """Return the exit status: 1 where anything is a problem, else 0."""
    return int(any(finding.level not in (OK, NOTE) for finding in findings))
