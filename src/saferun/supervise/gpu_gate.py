"""Test a run's GPUs before it starts, and recover them after a failure.

The test (gpu/preflight) runs while we do other things, above all while a torchrun imports torch.
It is over before the job touches a GPU, under `warn` as well: beside a test, a job on a GPU in
exclusive mode would get CUDA_ERROR_DEVICE_UNAVAILABLE, and one that fills its GPU would miss the
half gigabyte of the test's context. The recovery is in gpu/recovery.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from saferun.errors import own_fault
from saferun.gpu.cuda_errors import AFTER, DRAIN, RESET
from saferun.gpu.lock import gpu_locks, lock_owner
from saferun.gpu.lock.gpu_locks import Held
from saferun.gpu.preflight.preflight import PreflightTest
from saferun.gpu.preflight.preflight_report import Judged, in_a_line, lines
from saferun.journal import part_history
from saferun.journal.event_types import Preflight
from saferun.model import NOTE, PROBLEM, Finding, LaunchPlan, Request
from saferun.planning.inputs import RunInputs

if TYPE_CHECKING:
    from saferun.gpu.recovery import Recovered


def take_locks(gathered: RunInputs, say: Callable[[str], None]) -> Held:
    """Lock the GPUs as the profile says.

    Raises:
        BusyError: another run has a GPU, and the policy is not to wait.
    """
    assert gathered.profile is not None, "a supervised run has a profile"
    owner = lock_owner.this_process(command(gathered.request), gathered.identity.run)
    policy = gathered.profile.settings.locks
    return gpu_locks.acquire(
        gathered.facts.gpu.gpus, policy, owner, gathered.environ, gpu_locks.Surroundings(say)
    )


def command(request: Request) -> str:
    """Return the command in a run's record, which every user of the machine may read."""
    script = "-c" if request.options.code else request.line.script
    return os.path.basename(script or "no script")


class GpuCare:
    """The care for the GPUs of one run. The test before its first attempt starts immediately.

    Args:
        gathered: the inputs of the run's plans.
        plan: the plan of its first attempt.
        held: the locks on the GPUs.
        say: function that takes lines for people.
    """

    def __init__(
        self, gathered: RunInputs, plan: LaunchPlan, held: Held, say: Callable[[str], None]
    ) -> None:
        self._gathered, self._plan, self._held, self._say = gathered, plan, held, say
        self._policy = plan.settings.preflight
        self._findings: tuple[Finding, ...] = ()  # the last test's, after those of a recovery
        self._environ = {**plan.environment(gathered.environ), **held.environ()}
        self._test = None if self._policy.mode == "off" else self._begin()

    @property
    def waits(self) -> bool:
        """Return whether a test is running, so that there is time for preparations."""
        return self._test is not None

    def tested(self, kind: str) -> Preflight | None:
        """Return whether an attempt may use the GPUs; None if nothing was tested or known.

        Args:
            kind: kind of the previous failure; "" for the first attempt. The GPUs are tested again
                only after a failure that they may have caused.
        """
        known = () if kind else self._known_bad()
        for finding in known:
            self._say(in_a_line(finding))
        if any(finding.level == PROBLEM for finding in known):
            self._say("nothing is started (preflight.history: refuse)")
            return Preflight(False, known)
        if self._policy.mode == "off" or (kind and kind not in AFTER):
            return Preflight(True, known) if known else None
        granted = self._granted()
        return Preflight(granted, (*known, *self._findings))

    def _known_bad(self) -> tuple[Finding, ...]:
        """Return this machine's repeatedly failed parts, as problems if they are refused."""
        gathered, policy = self._gathered, self._policy
        if policy.history == "off":
            return ()
        try:
            found = part_history.findings(gathered.environ, gathered.facts.gpu.gpus)
        except Exception as error:
            self._say(own_fault("the history of parts could not be read", error))
            return ()
        refused = policy.history == "refuse" and policy.mode == "require"
        return tuple(one._replace(level=PROBLEM if refused else NOTE) for one in found)

    def recover(self, plan: LaunchPlan, kind: str, *, again: bool) -> tuple[Finding, ...]:
        """Recover the GPUs from a failure of this kind; return what was done and found.

        Usually there is nothing to do.

        Args:
            plan: the plan of the failed attempt.
            kind: kind of its failure.
            again: another attempt follows; otherwise only what the next run needs is done.
        """
        asks = AFTER.get(kind, frozenset())
        if not again:
            asks = asks & {RESET}
        if plan.settings.locks.slots > 1:
            asks = asks - {DRAIN}  # others use the GPU and keep its memory
        if not asks or not plan.gpus.gpus:
            return ()

        return self._recovered(dict.fromkeys(asks, ()), plan).findings

    def close(self) -> None:
        """End a test that is still running."""
        if self._test is not None:
            self._test.close()
            self._test = None

    def _begin(self) -> PreflightTest | None:
        try:
            return PreflightTest(self._environ)
        except OSError as error:
            self._say(f"the GPUs are not tested, no process could be started: {error.strerror}")
            return None

    def _granted(self) -> bool:
        """Return whether the job may start, once that is known; what is wrong has been reported.

        A fault of ours stops only those who asked for certainty (`require`).
        """
        try:
            judged = self._judged()
            if judged is not None and not judged.well and judged.asks:
                judged = self._again(judged)
        except Exception as error:
            self._say(own_fault("the GPUs could not be tested", error))
            return self._policy.mode != "require"
        if judged is not None and judged.well:
            return True
        for line in lines(judged) if judged is not None else ():
            self._say(line)
        if self._policy.mode == "require":
            self._say("nothing is started (preflight.mode: require)")
            return False
        self._say("starting all the same (preflight.mode: warn)")
        return True

    def _judged(self) -> Judged | None:
        """Take what the running test finds, or a new one; None where there is none."""
        from saferun.gpu.preflight.preflight_gate import examine  # only a test needs it: 10 ms

        test, self._test = self._test or self._begin(), None
        if test is None:
            return None
        with test:
            judged = examine(test, self._environ, self._plan.gpus, self._policy.timeout_s)
        self._findings = judged.findings
        return judged

    def _again(self, judged: Judged) -> Judged | None:
        """Recover what can be recovered, and try again if that has changed anything."""
        done = self._recovered(judged.asks, self._plan)
        again = self._judged() if done.acted else judged
        self._findings = (*done.findings, *self._findings)
        return again

    def _recovered(self, asks: Mapping[str, Sequence[str]], plan: LaunchPlan) -> Recovered:
        """Do for the GPUs what is asked for, as the profile allows.

        Args:
            asks: what cuda_errors names, and the UUIDs of the GPUs that are known to need it.
            plan: its policy, and its GPUs.
        """
        from saferun.gpu.recovery import Recovered, ResetTerms, recover  # only a failure needs it

        reset = plan.settings.recover.gpu_reset
        wanted = [ask for ask in asks if ask != RESET or reset != "never"]
        if not wanted:
            return Recovered((), acted=False)
        terms = ResetTerms(reset, self._held.alone, asks.get(RESET, ()))
        gpus, environ, runs = plan.gpus.gpus, self._gathered.environ, self._gathered.runs
        done = recover(gpus, wanted, environ, runs=runs, terms=terms)
        for finding in done.findings:
            self._say(in_a_line(finding))
        return done
