"""Observations of an attempt: on the machine while it runs, and in what it leaves behind."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from saferun.diagnosis import signatures
from saferun.diagnosis.attempt_outcome import ASKED, FAILED, REPLACED, SUCCEEDED, AttemptOutcome
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.process_end import launcher_end
from saferun.inject import contract
from saferun.inject.targets import NEEDS
from saferun.journal import receipts, recycling
from saferun.journal.receipts import Receipt
from saferun.model import LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.settings import HookSettings, leaves
from saferun.supervise import rank_processes
from saferun.supervise.attempt import evidence, machine_state
from saferun.supervise.attempt.evidence import OutOfMemoryKills
from saferun.supervise.attempt.machine_state import Scene
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.beside import Beside, seldom_s
from saferun.system import compile_cache

if TYPE_CHECKING:  # a launch does without dataclasses
    from saferun.diagnosis.nccl_tests import NcclTests

FRESH_CACHE = "fresh-compile-cache"  # the mitigation


class AttemptEvidence(Beside):
    """What is known of one attempt: it is looked at from outside while it runs, and at its end.

    Args:
        gathered: the run; its identity names the attempt.
        plan: the attempt's plan.
        nccl_finding: the finding of NCCL's tests in an earlier attempt; "" for none.
    """

    def __init__(self, gathered: RunInputs, plan: LaunchPlan, nccl_finding: str = "") -> None:
        self._gathered = gathered
        self._plan = plan
        self._injected = contract.VARIABLE in plan.env
        self._kills: OutOfMemoryKills | None = None
        self._launcher, self._began_s = 0, 0.0
        self.ranks_ran = False  # ranks were seen while it ran
        self._is_isolated = False  # one rank is a Python that ignores its environment
        self._progress = recycling.progress(gathered.identity.state)  # progress before the attempt
        self._nccl_finding = nccl_finding
        self.nccl_tests: NcclTests | None = None  # NCCL's findings, if the attempt failed
        self.request: recycling.ReplaceRequest | None = None  # a process's request to be replaced

    def started(self, launcher: int) -> None:
        """Note that the launcher runs, and the kernel's count of memory kills so far."""
        self._launcher, self._began_s = launcher, time.monotonic()
        self._kills = OutOfMemoryKills()  # the job starts at the same time
        self._kills.see((launcher,))  # a job may die before its ranks are examined

    def look(self) -> float:
        """Note which ranks run and which were killed for memory."""
        pids = list(rank_processes.ranks(self._launcher).values())
        if pids:
            self.ranks_ran = True
            self._is_isolated = any(map(rank_processes.is_isolated, pids))
        if self._kills:
            self._kills.see(pids or (self._launcher,))
        return seldom_s(self._began_s)

    def outcome(
        self, ended: AttemptEnd, ended_s: float, mitigations: tuple[str, ...]
    ) -> AttemptOutcome:
        """Return the record of an ended attempt, without a diagnosis.

        Args:
            ended: how the attempt ended.
            ended_s: seconds from the start of the first attempt to its end.
            mitigations: mitigations that were in force in its ranks.
        """
        identity = self._gathered.identity
        if ended.exit_code == contract.RECYCLE_STATUS:
            self.request = recycling.request(identity.receipts, identity.attempt)
        done = recycling.progress(identity.state) - self._progress
        progressed = done > 0 or (self.request is not None and self.request.progress > 0)
        replaced = self.request if progressed else None
        return AttemptOutcome(
            number=identity.attempt,
            exit_code=ended.exit_code,
            way=_way(ended, is_replaced=replaced is not None),
            lived_s=round(ended.lived_s, 3),
            ended_s=ended_s,
            mitigations=mitigations,
            first_step=_first_step(ended),
            progressed=progressed,
            diagnosis=Diagnosis((replaced and replaced.kind) or "no-failure"),
            replaced_for=replaced.why if replaced else "",
            launcher_end=_launcher_end(ended, self._plan.launcher),
            ended_by=ended.ended_by,
            signals=ended.forwarded,
            killed=ended.report.killed,
            unkillable=tuple(ended.report.unkillable),
        )

    def diagnosed(
        self,
        last: AttemptOutcome,
        ended: AttemptEnd,
        hang: Hang | None = None,
        lost: str = "",
        stall: Hang | None = None,
    ) -> AttemptOutcome:
        """Return the record of a failed attempt with its diagnosis.

        Args:
            last: the attempt.
            ended: how the attempt ended.
            hang: why the watch ended it; None if it did not.
            lost: the agent's message on lost nodes; "" for none.
            stall: the rank that others waited for when it ended.
        """
        # Only a failure needs this import, which takes 60 ms.
        from saferun.diagnosis.deciding import classify

        identity = self._gathered.identity
        kills = self._kills.since() if self._kills else None
        known = signatures.load()
        seen = evidence.evidence(ended, identity.receipts, identity.attempt, kills)
        exited = self._gathered.launcher is None and ended.signal is None
        named = self.request.kind if self.request is not None else ""
        seen = seen._replace(hang=hang, stall=stall, named=named, exited=exited)
        diagnosis = classify.classify(seen, known)
        observed = machine_state.observed(seen, self._scene(ended))
        diagnosis = classify.by_machine(diagnosis, observed, known)
        diagnosis = classify.by_nodes(diagnosis, lost, known)
        self.nccl_tests = self._nccl_tests(ended)
        diagnosis = classify.by_nccl(diagnosis, self.nccl_tests, self._nccl_finding, known)
        return last._replace(
            way=FAILED if self._failed_by_itself(ended, diagnosis) else last.way,
            diagnosis=diagnosis,
            offered=self._offered(diagnosis, ended.started_at),
            waits=diagnosis.kind in known.kinds and known.kinds[diagnosis.kind].waits,
            fingerprint=classify.fingerprint(diagnosis),
            last_step=seen.step,
            no_number=hang.no_number if hang else None,
            ended_by="loss" if hang and hang.no_number else last.ended_by,
        )

    def _nccl_tests(self, ended: AttemptEnd) -> NcclTests | None:
        from saferun.diagnosis import nccl_tests  # only a failure needs its patterns

        outputs = (*ended.report.heads, *ended.report.tails)
        if not any(nccl_tests.MARK in output for output in outputs):
            return None
        identity = self._gathered.identity
        size = receipts.nccl(receipts.read(identity.receipts, identity.attempt))[1]
        return nccl_tests.read(outputs, size)

    def _offered(self, diagnosis: Diagnosis, began_s: float) -> tuple[str, ...]:
        """Return a failure's mitigations, a fresh cache first if an old one may be the cause.

        A cached graph that another rank or machine compiled fails with the same message as
        autotuning: https://github.com/pytorch/pytorch/issues/188332
        """
        found = diagnosis.mitigations
        if found[:1] == ("autotune-off",) and "invalid argument" in diagnosis.root_line.lower():
            environ = self._plan.environment(self._gathered.environ)
            if compile_cache.has_older(environ, began_s):
                return (FRESH_CACHE, *found)
        return found

    def _scene(self, ended: AttemptEnd) -> Scene:
        """Return where the attempt ran, and where it wrote, if known."""
        environ = self._plan.environment(self._gathered.environ)
        checkpoints = self._plan.settings.retry.resume.checkpoints
        folders = (os.path.dirname(checkpoints), ".", environ.get("TMPDIR", "/tmp"), "~")  # noqa: S108 - looked at, not written to
        return Scene(
            environ=environ,
            gpus=self._plan.gpus.gpus,
            began_s=ended.started_at,
            folders=tuple(os.path.expanduser(folder) for folder in folders if folder),
            signal=ended.signal,
        )

    def _failed_by_itself(self, ended: AttemptEnd, diagnosis: Diagnosis) -> bool:
        """Return whether it failed for a passing reason soon after a signal that only ranks got."""
        if ended.interrupted or set(ended.forwarded) & set(self._plan.options.handled_signals):
            return False
        return diagnosis.verdict in ("retry", "mitigate")

    def receipts(self, *, kept: bool) -> tuple[tuple[Receipt, ...], bool]:
        """Return the ranks' receipts, and whether a missing one means that hooks did not run.

        Args:
            kept: whether receipts could be written at all.
        """
        identity = self._gathered.identity
        found = receipts.read(identity.receipts, identity.attempt)
        # On a full disk a missing receipt does not prove that hooks did not run.
        kept = kept and not receipts.unwritten(identity.receipts, identity.attempt)
        return found, kept and self.ranks_ran

    def hook_problems(self, found: tuple[Receipt, ...], *, ranks_ran: bool) -> tuple[str, ...]:
        """Return lines about hooks that failed or did not run in the ranks.

        Args:
            found: the ranks' receipts.
            ranks_ran: whether ranks were seen during the attempt.
        """
        request = self._gathered.request
        foreign = request.options.no_python or "PYTHON_EXEC" in self._gathered.environ
        if ranks_ran:
            foreign = foreign and not self._is_isolated
        return receipts.judge(
            found,
            expects_hooks=self._injected and self._gathered.identity.receipts is not None,
            ranks_ran=ranks_ran,
            no_python=foreign,
            needed=_needed(self._plan.settings.hooks),
        )


def _way(ended: AttemptEnd, *, is_replaced: bool) -> str:
    if ended.end_requested:
        return ASKED
    if ended.exit_code == 0:
        return SUCCEEDED
    return REPLACED if is_replaced else FAILED


def _launcher_end(ended: AttemptEnd, launcher: str) -> str:
    """Return the signal that the launcher died of, in words; "" if none, or if we ended it."""
    if ended.signal is None or ended.ended_by != "job" or ended.interrupted:
        return ""

    return launcher_end(ended.signal, torchrun=launcher == "torchrun")


def _needed(hooks: HookSettings) -> set[str]:
    """Return the modules of torch whose hooks must be in place for a plan's settings."""
    found: set[str] = set()
    for name, key, value in leaves(hooks):
        found.update(NEEDS.get(name, ()) if value != key.default else ())
    return found


def _first_step(ended: AttemptEnd) -> int | None:
    if not any(ended.report.heads):
        return None

    from saferun.diagnosis.reading.progress import first_step  # only an attempt's end needs it

    steps = [step for head in ended.report.heads if (step := first_step(head)) is not None]
    return max(steps, default=None)
