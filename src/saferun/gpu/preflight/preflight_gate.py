"""Whether the job may have its GPUs: they are tried first, and those that fail are named.

The test (preflight.py) runs while we do other things, above all while a torchrun imports torch.
It is over before the job touches a GPU, under `warn` as well: beside a test, a job on a GPU in
exclusive mode would get CUDA_ERROR_DEVICE_UNAVAILABLE, and one that fills its GPU would miss the
half gigabyte of the test's context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saferun.errors import BusyError
from saferun.gpu import nvml
from saferun.gpu.cuda_errors import RESET
from saferun.gpu.lock import gpu_locks, lock_owner
from saferun.gpu.lock.gpu_locks import Held
from saferun.gpu.preflight import preflight, preflight_report
from saferun.gpu.preflight.preflight_report import Around, Judged, cards, in_a_line, lines
from saferun.gpu.recovery import EVERYTHING, NVML_S, Recovered, ResetTerms, recover
from saferun.model import OK, PROBLEM, Finding, Gpu, GpuFacts, LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.settings import LockPolicy
from saferun.system.gpus import addresses
from saferun.system.procfs import comm

LEAST_S = 1.0  # a further question is given this long, however late it is
HELD = (2, 46)  # CUDA's errors that a holder explains
MOST_ALONE = 16  # GPUs that are tried one by one
ALONE = LockPolicy(
    gpus="refuse", wait_s=0.0, slots=1, slot_memory_gib=None
)  # recovery needs the GPUs alone

Say = Callable[[str], None]


def recovered(
    asks: Mapping[str, Sequence[str]],
    gathered: RunInputs,
    plan: LaunchPlan,
    held: Held,
) -> Recovered:
    """Do for a run's GPUs what is asked for, as its profile allows.

    Args:
        asks: what cuda_errors names, and the UUIDs of the GPUs that are known to need it.
        gathered: the run's inputs.
        plan: its policy, and its GPUs.
        held: its locks.
    """
    reset = plan.settings.recover.gpu_reset
    wanted = [ask for ask in asks if ask != RESET or reset != "never"]
    if not wanted:
        return Recovered((), acted=False)
    return recover(
        plan.gpus.gpus,
        wanted,
        gathered.environ,
        runs=gathered.runs,
        terms=ResetTerms(reset, held.alone, asks.get(RESET, ())),
    )


class Clearance:
    """The preflight of one run, whose locks are taken. Its test begins at once.

    `granted` is asked as late as possible.

    Args:
        gathered: what was found out about the machine.
        plan: the first attempt's: its policy, and the GPUs of the job.
        held: the locks.
        say: takes lines for people.
    """

    def __init__(self, gathered: RunInputs, plan: LaunchPlan, held: Held, say: Say) -> None:
        self.findings: tuple[Finding, ...] = ()  # the last test's, after those of a recovery
        self._gathered, self._plan, self._held, self._say = gathered, plan, held, say
        self._policy = plan.settings.preflight
        self._environ = {**plan.environment(gathered.environ), **held.environ()}
        self._test = self._begin()

    def __enter__(self) -> Clearance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End a test that is still running."""
        if self._test is not None:
            self._test.close()
            self._test = None

    def granted(self) -> bool:
        """Return whether the job may start, once that is known; what is wrong has been reported.

        A fault of ours stops only those who asked for certainty (`require`).
        """
        try:
            return self._granted()
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"the GPUs could not be tested, a fault of saferun's own ({what})")
            return self._policy.mode != "require"

    def _granted(self) -> bool:
        judged = self._judged()
        if judged is not None and not judged.well and judged.asks:
            judged = self._again(judged)
        if judged is not None and judged.well:
            return True
        return self._decide(lines(judged) if judged is not None else [])

    def _begin(self) -> preflight.PreflightTest | None:
        try:
            return preflight.PreflightTest(self._environ)
        except OSError as error:
            self._say(f"the GPUs are not tested, no process could be started: {error.strerror}")
            return None

    def _judged(self) -> Judged | None:
        """Take what the running test finds; None where there was none."""
        test = self._test or self._begin()
        self._test = None
        if test is None:
            return None
        with test:
            judged = examine(test, self._environ, self._plan.gpus, self._policy.timeout_s)
        self.findings = judged.findings
        return judged

    def _again(self, judged: Judged) -> Judged | None:
        """Recover what can be recovered, and try again if that has changed anything."""
        done = recovered(judged.asks, self._gathered, self._plan, self._held)
        for finding in done.findings:
            self._say(in_a_line(finding))
        again = self._judged() if done.acted else judged
        self.findings = (*done.findings, *self.findings)
        return again

    def _decide(self, trouble: Sequence[str]) -> bool:
        """Report what is wrong and what follows; return whether the job may start."""
        for line in trouble:
            self._say(line)
        if self._policy.mode == "require":
            self._say("nothing is started (preflight.mode: require)")
            return False
        self._say("starting all the same (preflight.mode: warn)")
        return True


# --- one test, and what else has to be asked ----------------------------------------------------


def examine(
    test: preflight.PreflightTest, environ: Mapping[str, str], facts: GpuFacts, timeout_s: float
) -> Judged:
    """Wait for a test and judge it; ask the machine for what its failure leaves open.

    Args:
        test: it has been started.
        environ: the job's.
        facts: the GPUs that the job should see.
        timeout_s: seconds from now, for all questions together.
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
    """Try each GPU in a process that sees no other: one that is broken can keep all from starting.

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
    """Return who holds each GPU and where it sits, by UUID, as NVML says."""
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


# --- recovery on its own -------------------------------------------------------------------------


def recover_cuda_context(
    environ: Mapping[str, str], facts: GpuFacts, *, reset: str, runs: str
) -> tuple[Finding, ...]:
    """Bring the visible GPUs back into use as far as we may, then try them: `doctor --recover`.

    Args:
        environ: the caller's.
        facts: the visible GPUs.
        reset: `recover.gpu_reset`.
        runs: the directory of the runs' journals.
    """
    trouble: list[Finding] = []

    def say(line: str) -> None:
        trouble.append(Finding(PROBLEM, "locks", line, "", "nothing is reset without the lock"))

    owner = lock_owner.this_process("saferun doctor --recover", "")
    named = [gpu for gpu in facts.gpus if gpu.uuid]
    try:
        held = gpu_locks.acquire(named, ALONE, owner, environ, gpu_locks.World(say))
    except BusyError as busy:
        fix = "nothing is recovered while another run has them; wait for it to end"
        return (Finding(PROBLEM, "locks", busy.what, "", fix),)
    with held:
        before = _tried(environ, facts)
        terms = ResetTerms(reset, held.alone, before.asks.get(RESET, ()))
        done = recover(facts.gpus, EVERYTHING, environ, runs=runs, terms=terms)
        after = before if not done.acted else _tried(environ, facts)
    if not done.findings and after.well:
        trouble.append(Finding(OK, "recovery", "nothing to recover", "", ""))
    return (*trouble, *done.findings, *after.findings)


def _tried(environ: Mapping[str, str], facts: GpuFacts) -> Judged:
    try:
        with preflight.PreflightTest(environ) as test:
            return examine(test, environ, facts, preflight.TIMEOUT_S)
    except OSError as error:
        what = f"no process could be started for a test: {error.strerror}"
        fix = "look at ulimit -u and at free memory"
        return Judged((Finding(PROBLEM, "GPUs", what, "", fix),))
