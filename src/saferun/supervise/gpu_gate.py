"""What a run does for its GPUs: try them before it starts, recover them after a failure.

The test is in gpu/preflight/preflight_gate.py, the recovery in gpu/recovery.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.gpu.cuda_errors import AFTER, DRAIN, RESET
from saferun.gpu.lock import gpu_locks, lock_owner
from saferun.gpu.lock.gpu_locks import Held
from saferun.gpu.preflight.preflight_report import in_a_line
from saferun.journal import part_history
from saferun.journal.event_types import Preflight
from saferun.model import NOTE, PROBLEM, Finding, LaunchPlan, Request
from saferun.planning.inputs import RunInputs
from saferun.system.descriptors import plug_closed_descriptors


def take_locks(gathered: RunInputs, say: Callable[[str], None]) -> Held:
    """Lock the GPUs as the profile says.

    Raises:
        BusyError: another run has one, and the policy is not to wait.
    """
    plug_closed_descriptors()  # or a lock file would become the job's output
    assert gathered.profile is not None, "a supervised run has a profile"
    owner = lock_owner.this_process(command(gathered.request), gathered.identity.run)
    policy = gathered.profile.settings.locks
    return gpu_locks.acquire(
        gathered.facts.gpu.gpus, policy, owner, gathered.environ, gpu_locks.World(say)
    )


def command(request: Request) -> str:
    """Return what a run's record says that it runs; every user of the machine may read it."""
    script = "-c" if request.options.code else request.line.script
    return os.path.basename(script or "no script")


class GpuCare:
    """The care for the GPUs of one run. The test before its first attempt starts at once.

    Args:
        gathered: what the run's plans are computed from.
        plan: that of its first attempt.
        held: the locks on the GPUs.
        say: takes lines for people.
    """

    def __init__(
        self, gathered: RunInputs, plan: LaunchPlan, held: Held, say: Callable[[str], None]
    ) -> None:
        self._gathered = gathered
        self._held = held
        self._say = say
        self._check: Clearance | None = None
        if plan.settings.preflight.mode != "off":
            from saferun.gpu.preflight.preflight_gate import Clearance  # only a test: 10 ms

            self._check = Clearance(gathered, plan, held, say)
        self._policy = plan.settings.preflight

    @property
    def waits(self) -> bool:
        """Whether a test runs, so that there is time to prepare something."""
        return self._check is not None

    def tested(self, kind: str) -> Preflight | None:
        """Return whether an attempt may have the GPUs; None where they are not tested before it.

        Args:
            kind: the failure before it; "" for the first attempt. They are tested again only
                after one that may be theirs.
        """
        known = () if kind else self._known_bad()
        for finding in known:
            self._say(in_a_line(finding))
        if any(finding.level == PROBLEM for finding in known):
            self._say("nothing is started (preflight.history: refuse)")
            return Preflight(False, known)
        if self._check is None or (kind and kind not in AFTER):
            return Preflight(True, known) if known else None
        granted = self._check.granted()
        return Preflight(granted, (*known, *self._check.findings))

    def _known_bad(self) -> tuple[Finding, ...]:
        """Return the parts of this machine that failed again and again; problems if refused."""
        gathered, policy = self._gathered, self._policy
        if policy.history == "off":
            return ()
        try:
            found = part_history.findings(gathered.environ, gathered.facts.gpu.gpus)
        except Exception as error:
            self._say(f"the history of parts could not be read ({type(error).__name__}: {error})")
            return ()
        refused = policy.history == "refuse" and policy.mode == "require"
        return tuple(one._replace(level=PROBLEM if refused else NOTE) for one in found)

    def recover(self, plan: LaunchPlan, kind: str, *, again: bool) -> tuple[Finding, ...]:
        """Do for the GPUs what a failure of this kind calls for; return what was done and found.

        Usually that is nothing.

        Args:
            plan: that of the attempt which failed.
            kind: the kind of its failure.
            again: another attempt follows; else only what the next run would need is done.
        """
        asks = AFTER.get(kind, frozenset())
        if not again:
            asks = asks & {RESET}
        if plan.settings.locks.slots > 1:
            asks = asks - {DRAIN}  # others use the GPU, and their memory stays
        if not asks or not plan.gpus.gpus:
            return ()

        from saferun.gpu.preflight.preflight_gate import recovered  # only a failure needs it

        wanted: dict[str, tuple[str, ...]] = dict.fromkeys(asks, ())
        done = recovered(wanted, self._gathered, plan, self._held)
        for finding in done.findings:
            self._say(in_a_line(finding))
        return done.findings

    def close(self) -> None:
        """End a test that is still running."""
        if self._check is not None:
            self._check.close()
