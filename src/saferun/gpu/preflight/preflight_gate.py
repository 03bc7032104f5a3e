"""What a test of the GPUs means with what else the machine is asked; `doctor --recover`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saferun.errors import BusyError
from saferun.gpu import nvml
from saferun.gpu.cuda_errors import RESET
from saferun.gpu.lock import gpu_locks, lock_owner
from saferun.gpu.preflight import preflight, preflight_report
from saferun.gpu.preflight.preflight_report import Around, Judged, cards
from saferun.gpu.recovery import EVERYTHING, NVML_S, ResetTerms, recover
from saferun.model import OK, PROBLEM, Finding, Gpu, GpuFacts
from saferun.settings import LockPolicy
from saferun.system.gpus import addresses
from saferun.system.procfs import comm

LEAST_S = 1.0  # a further question gets at least this long
HELD = (2, 46)  # CUDA errors that another process on the GPU explains
MOST_ALONE = 16  # most GPUs that are tested one by one
# Recovery needs exclusive GPUs.
ALONE = LockPolicy(gpus="refuse", wait_s=0.0, slots=1, slot_memory_gib=None)


def examine(
    test: preflight.PreflightTest, environ: Mapping[str, str], facts: GpuFacts, timeout_s: float
) -> Judged:
    """Wait for a test and judge it; ask the machine for what a failure leaves open.

    Args:
        test: a test that has been started.
        environ: the job's environment.
        facts: the GPUs that the job should see.
        timeout_s: time limit for all questions together, in seconds from now.
    """
    began = time.monotonic()
    document = test.report(timeout_s)

    def left_s() -> float:
        return max(LEAST_S, began + timeout_s - time.monotonic())

    if preflight.is_well(document):
        return preflight_report.judge(document, facts, timeout_s)
    around = _ask_around(document, environ, facts, left_s)
    return preflight_report.judge(document, facts, timeout_s, around)


def _ask_around(
    document: Mapping[str, Any],
    environ: Mapping[str, str],
    facts: GpuFacts,
    left_s: Callable[[], float],
) -> Around:
    alone: Mapping[str, Any] = {}
    for_all = document["code"] or document["ended"] == "crash"
    if for_all and len(facts.gpus) > 1:
        alone = _one_by_one(environ, facts.gpus, left_s)
    codes = {card.code for card in cards(document)} | {document["code"]}
    codes |= {card.code for one in alone.values() for card in cards(one)}
    places, holders = addresses(), dict[str, str]()
    if codes & set(HELD) or not places:
        holders, named = _ask_nvml(environ, left_s())
        places = {**named, **places}
    return Around(alone, holders, places)


def _one_by_one(
    environ: Mapping[str, str], gpus: Sequence[Gpu], left_s: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    """Test each GPU in a process that sees no other: a broken one can keep all from starting.

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html suggests it for 804.
    """
    tests: dict[str, preflight.PreflightTest] = {}
    try:
        for gpu in gpus[:MOST_ALONE]:
            if gpu.uuid:
                only = {**environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
                tests[gpu.uuid] = preflight.PreflightTest(only)
        return {uuid: test.report(left_s()) for uuid, test in tests.items()}
    except OSError:
        return {}
    finally:
        for test in tests.values():
            test.close()


def _ask_nvml(
    environ: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Return NVML's answers on who holds each GPU, and on its place, by UUID."""
    report = nvml.ask(environ, min(timeout_s, NVML_S)).report
    holders: dict[str, str] = {}
    places: dict[str, str] = {}
    for card in report.cards:
        uuid = card.get("GPU UUID")
        places[uuid] = card.bus
        named = [
            f"pid {p.pid} ({comm(p.pid)}{'' if p.used_mib is None else f', {p.used_mib} MiB'})"
            for p in card.processes
        ]
        if named:
            holders[uuid] = ", ".join(named[:4])
    return holders, places


def recover_cuda_context(
    environ: Mapping[str, str], facts: GpuFacts, *, reset: str, runs: str
) -> tuple[Finding, ...]:
    """Bring the visible GPUs back into use as allowed, then test them: `doctor --recover`.

    Args:
        environ: the caller's environment.
        facts: the visible GPUs.
        reset: value of `recover.gpu_reset`.
        runs: the directory of the runs' journals.
    """
    trouble: list[Finding] = []

    def say(line: str) -> None:
        trouble.append(Finding(PROBLEM, "locks", line, "", "nothing is reset without the lock"))

    owner = lock_owner.this_process("saferun doctor --recover", "")
    named = [gpu for gpu in facts.gpus if gpu.uuid]
    try:
        held = gpu_locks.acquire(named, ALONE, owner, environ, gpu_locks.Surroundings(say))
    except BusyError as busy:
        fix = "nothing is recovered while another run has them; wait for it to end"
        return (Finding(PROBLEM, "locks", busy.what, "", fix),)
    with held:
        before = _tried(environ, facts)
        terms = ResetTerms(reset, held.alone, before.asks.get(RESET, ()))
        done = recover(facts.gpus, EVERYTHING, environ, runs=runs, terms=terms)
        after = before if not done.acted else _tried(environ, facts)
    if not done.findings and after.well:
        trouble.append(Finding(OK, "recovery", "nothing to recover"))
    return (*trouble, *done.findings, *after.findings)


def _tried(environ: Mapping[str, str], facts: GpuFacts) -> Judged:
    try:
        with preflight.PreflightTest(environ) as test:
            return examine(test, environ, facts, preflight.TIMEOUT_S)
    except OSError as error:
        what = f"no process could be started for a test: {error.strerror}"
        fix = "look at ulimit -u and at free memory"
        return Judged((Finding(PROBLEM, "GPUs", what, "", fix),))
