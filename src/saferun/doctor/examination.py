"""`saferun doctor`: collect the machine's facts, all at once and with a limit, and judge them.

    all_sources.py -> vitals -> judge (checks_*, xid, audit) -> findings -> view

A source that hangs or fails becomes a finding. The machine's faults raise nothing here, and
everything ends within 20 s (except for `--full` and `--recover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from saferun.audit import report as audit
from saferun.base.durations import seconds
from saferun.doctor import full, xid
from saferun.doctor.checks import (
    checks_driver,
    checks_gpu,
    checks_host,
    checks_links,
    checks_network,
    checks_speed,
)
from saferun.doctor.collect.all_sources import SOURCES, Collected, Gpus, Vitals, collect
from saferun.errors import OWN_FAULT
from saferun.gpu.preflight import preflight_gate
from saferun.journal import part_history
from saferun.model import NOTE, OK, PROBLEM, Finding, MachineFacts
from saferun.planning import inputs
from saferun.planning.request import read
from saferun.system import paths
from saferun.system.printable import printable
from saferun.system.redact import Masker

DEADLINE_S = 17.5  # the promise is 20 s; starting and printing take the rest


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings, and the facts behind them."""

    findings: tuple[Finding, ...]
    vitals: Vitals


def examine(
    environ: Mapping[str, str], cwd: str, *, recover: bool = False, deadline_s: float = DEADLINE_S
) -> Examination:
    """Collect the facts and judge them.

    Args:
        environ: the environment of the jobs that will run.
        cwd: the directory where they will run.
        recover: first bring the GPUs back into use, as far as the profile allows; the deadline does
            not limit this.
        deadline_s: seconds; sources without an answer by then are named in a finding.

    Returns:
        The findings, each once and without secrets, and the facts.

    Raises:
        SaferunError: the environment has a wrong saferun setting (only with `recover`).
    """
    done = _recover(environ, cwd) if recover else ()
    collected = collect(environ, cwd, deadline_s)
    judged = judge(collected.vitals, environ, collected.answered)
    masker = Masker(environ, ())
    found = {
        _identity(finding): masked(finding, masker)
        for finding in (*done, *_unanswered(collected), *judged)
    }
    return Examination(tuple(found.values()), collected.vitals)


def _identity(finding: Finding) -> Finding:
    """Return what equal findings share: both recovery and the test examine the GPUs."""
    return finding._replace(detail="") if finding.level == OK else finding


def _recover(environ: Mapping[str, str], cwd: str) -> tuple[Finding, ...]:
    """Call `recover_cuda_context` with the settings of a launch here."""
    plan = inputs.gather(read(["SCRIPT"], environ), environ, cwd).plan()
    if not plan.gpus.gpus:
        return (Finding(NOTE, "recovery", "no GPU that a job would see"),)
    reset = plan.settings.recover.gpu_reset
    place = paths.runs_dir(None, environ, cwd)
    return preflight_gate.recover_cuda_context(environ, plan.gpus, reset=reset, runs=place)


def measure(known: Examination, environ: Mapping[str, str]) -> Examination:
    """Return an examination with the GPUs' speed (`--full`): takes under 60 s, at full load."""
    gpus = known.vitals.gpus
    if not gpus.facts.gpus:
        what = "no GPU that a job would see: nothing was measured"
        return replace(known, findings=(*known.findings, Finding(NOTE, "speed", what)))
    measured = full.measure(environ, len(gpus.facts.gpus))
    numbers = gpus.smi.report.numbers()
    linked = any(up for up, _ in gpus.smi.links.values())
    found = checks_speed.judge(measured, numbers, linked)
    masker = Masker(environ, ())
    return Examination(
        (*known.findings, *(masked(finding, masker) for finding in found)),
        replace(known.vitals, measured=measured),
    )


def _unanswered(collected: Collected) -> Iterator[Finding]:
    """Yield the sources without an answer: the machine hangs, or saferun has a fault."""
    for name, late_s in collected.late.items():
        what = f"{SOURCES[name]}: no answer within {seconds(late_s)}"
        fix = "what is asked there hangs, and would for a job"
        yield Finding(PROBLEM, "doctor", what, "", fix)
    for name, error in collected.failed.items():
        yield _our_fault(f"{SOURCES[name]}: could not be asked", error)


def judge(
    vitals: Vitals, environ: Mapping[str, str], answered: frozenset[str] = frozenset(SOURCES)
) -> list[Finding]:
    """Judge the facts, except those of sources that did not answer.

    Args:
        vitals: the facts.
        environ: the environment of the jobs.
        answered: the sources (keys of SOURCES) that answered.

    Returns:
        The findings, in the order of the checks.
    """
    found: list[Finding] = []
    for needs, check in _checks(vitals, environ):
        if needs <= answered:
            found += _guarded(check)
    return found


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; an exception in it becomes a finding."""
    try:
        return list(check())
    except Exception as error:
        return [_our_fault("a check failed", " ".join(f"{type(error).__name__}: {error}".split()))]


def _our_fault(what: str, error: str) -> Finding:
    return Finding(
        NOTE, "doctor", f"{what}, {OWN_FAULT}", error[:300], "please report it with this text"
    )


def _checks(
    v: Vitals, environ: Mapping[str, str]
) -> Iterator[tuple[set[str], Callable[[], Iterable[Finding]]]]:
    """Yield every check with the sources that it needs."""
    smi, cuda = v.gpus.smi, v.gpus.cuda
    present = max(len(smi.report.cards), len(v.gpus.facts.gpus))
    mine = [found.uuid for found in v.gpus.facts.gpus]
    rdma_off = environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    yield {"files", "gpus"}, lambda: checks_driver.presence(v.files, smi, cuda)
    yield {"files"}, lambda: checks_driver.nodes(v.files)
    yield {"files", "gpus", "torch"}, lambda: checks_driver.versions(v.files, smi, cuda, v.torch)
    yield {"gpus", "torch"}, lambda: checks_driver.architectures(smi, cuda, v.torch)
    yield {"files", "gpus"}, lambda: checks_gpu.judge(smi, v.files, mine)
    yield {"gpus"}, lambda: v.gpus.test
    yield {"gpus"}, lambda: _untried(v.gpus)
    yield {"gpus"}, lambda: checks_links.peers(smi, cuda)
    yield {"gpus"}, lambda: checks_links.nvlinks(smi)
    yield {"files", "gpus", "log"}, lambda: _events(v)
    yield {"gpus"}, lambda: part_history.findings(environ, v.gpus.facts.gpus)
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
    yield (
        {"files", "host", "gpus"},
        lambda: checks_host.numa(v.files.numa, v.host.numa, v.gpus.smi.report.numbers()),
    )
    yield {"host"}, lambda: checks_host.limits(v.host.limits)
    yield {"host"}, lambda: checks_host.clock(v.host.clock)
    yield (
        {"host", "torch", "gpus"},
        lambda: checks_host.compilers(v.host.tools, v.torch, environ, bool(present)),
    )
    yield {"gpus"}, lambda: checks_host.scheduler(environ, v.gpus.facts, present)
    facts = MachineFacts(gpu=v.gpus.facts, torch=v.torch.torch or None)
    adapters = {port.device for port in v.network.infiniband}
    yield set(), lambda: audit.findings(environ, facts, adapters=adapters)


def _untried(gpus: Gpus) -> Iterator[Finding]:
    numbers = gpus.smi.report.numbers()
    for card in gpus.smi.report.cards:
        if card.get("GPU UUID") in gpus.full:
            what = f"not tried: {card.get('FB Memory Usage/Free')} MiB of its memory are free"
            yield Finding(NOTE, f"GPU {numbers[card.bus]}", what)


def _events(vitals: Vitals) -> list[Finding]:
    """Judge the driver's events in the kernel log, if there is a driver."""
    report = vitals.gpus.smi.report
    if not (vitals.files.version or report.cards or report.lost):
        return []
    if not vitals.log.source:
        fix = "`sudo dmesg | grep -i xid` on the host"
        what = "the kernel's log may not be read here: Xid events stay unseen"
        return [Finding(NOTE, "kernel log", what, vitals.log.trouble, fix)]
    numbers = report.numbers()
    well = [card.bus for card in report.cards if checks_gpu.healthy_by_driver(card)]
    return xid.judge(tuple(xid.parse(vitals.log.lines)), xid.catalogue(), numbers, well)


def masked(finding: Finding, masker: Masker) -> Finding:
    """Return a finding without secrets: it may quote command lines and output of programs.

    Characters that a terminal would interpret, or an encoding refuse, are replaced, too.
    """
    return Finding(finding.level, *(_printable(masker.text(text)) for text in finding[1:]))


def _printable(text: str) -> str:
    return printable(" ".join(text.split()))


def status(findings: tuple[Finding, ...]) -> int:
    """Return the exit status: 1 if there is any problem, else 0."""
    return int(any(finding.level not in (OK, NOTE) for finding in findings))
