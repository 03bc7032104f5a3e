"""What one run writes into its journal, event by event.

Writing is a convenience: nothing here stops or slows a job (journal/writer.py sees to that).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.plan.view import as_json
from saferun.system.procfs import this_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.classify import Diagnosis
    from saferun.diagnosis.retry_policy import Decision, Try
    from saferun.journal.writer import Journal
    from saferun.model import Finding, LaunchPlan
    from saferun.plan.inputs import Gathered
    from saferun.supervise.attempt import Ended

VERDICT_FILE = "SAFERUN_VERDICT_FILE"  # the variable: a path of the user's


class Record:
    """The journal of a run, and what is still to be written to it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tails: tuple[int, bytes, bytes] | None = None  # that are not on the disk yet

    @property
    def path(self) -> str | None:
        """The run's directory; None where nothing can be written."""
        return self._journal.path

    @property
    def takes_receipts(self) -> bool:
        """Whether ranks could leave receipts."""
        return self._journal.took_receipts()

    def attempt(self, number: int, plan: LaunchPlan) -> None:
        """An attempt begins."""
        self._journal.plan(as_json(plan))
        by = this_process()
        self._journal.event("attempt", attempt=number, mitigations=plan.mitigations, by=by)

    def started(self, keeper: int, launcher: int) -> None:
        """Its processes run; there is time to write what the attempt before it left."""
        self._journal.event("started", keeper=keeper, launcher=launcher)
        self.keep_tails()

    def preflight(self, granted: bool, findings: tuple[Finding, ...]) -> None:
        """The GPUs were tried."""
        shown = [finding._asdict() for finding in findings]
        self._journal.event("preflight", granted=granted, findings=shown)

    def recovery(self, findings: tuple[Finding, ...]) -> None:
        """Something was done for the GPUs after a failure."""
        self._journal.event("recovery", findings=[finding._asdict() for finding in findings])

    def ended(
        self, ended: Ended, last: Try, diagnosis: Diagnosis | None, decision: Decision
    ) -> None:
        """An attempt has ended.

        Args:
            ended: how.
            last: the same as the decision saw it.
            diagnosis: of its failure; None after a success.
            decision: what happens next.
        """
        self._journal.event(
            "ended",
            attempt=last.number,
            status=ended.exit_code,
            lived_s=round(ended.lived_s, 3),
            ended_by=ended.ended_by,
            signals=ended.forwarded,
            killed=ended.killed,
            unkillable=ended.unkillable,
            kind=last.kind,
            fingerprint=last.fingerprint,
            root_rank=diagnosis.root_rank if diagnosis else None,
            root_line=diagnosis.root_line if diagnosis else None,
            action=decision.action,
            reason=decision.reason,
            delay_s=round(decision.delay_s, 3),
            add=decision.add,
        )
        self._tails = (last.number, ended.stdout_tail, ended.stderr_tail)

    def keep_tails(self) -> None:
        """Write the ends of an attempt's output; done while the next one starts."""
        if self._tails is not None:
            self._journal.tails(*self._tails)
            self._journal.sync()
            self._tails = None

    def fault(self, error: Exception, *, traceback: str = "") -> None:
        """Something of ours went wrong; the job goes on."""
        more = {"traceback": traceback} if traceback else {}
        self._journal.event("fault", what=f"{type(error).__name__}: {error}", **more)

    def harmlessly(self, work: Callable[[], None]) -> None:
        """Do what the running job does not need: a fault of ours there is the journal's alone."""
        try:
            work()
        except Exception as error:
            self.fault(error)

    def end(self, status: int | None, reason: str) -> None:
        """The run is over."""
        known = {} if status is None else {"status": status}
        self._journal.event("end", **known, reason=reason)
        self.keep_tails()

    def close(self) -> None:
        """Nothing more is written."""
        self._journal.close()


def begin(gathered: Gathered, say: Callable[[str], None]) -> tuple[Gathered, Journal]:
    """Make the run's directory; its name is the run's identity from here on.

    Args:
        gathered: what the run's plans are computed from.
        say: takes lines for people.

    Returns:
        The same with the final identity, and the journal.
    """
    from saferun.journal.writer import Journal
    from saferun.system.redact import Masker

    request = gathered.request
    masker = Masker(gathered.environ, (*request.line.args, *(text for _, text, _ in request.sets)))
    journal = Journal.begin(gathered.runs, gathered.identity.run, masker, say=say)
    identity = gathered.identity._replace(receipts=journal.receipts())
    if journal.path:  # another run may have had the name
        identity = identity._replace(run=os.path.basename(journal.path))
    return gathered._replace(identity=identity), journal


def leave_verdict(gathered: Gathered, last: Try | None) -> None:
    """Write the verdict of a failed run to the file that `SAFERUN_VERDICT_FILE` names."""
    path = gathered.environ.get(VERDICT_FILE)
    if path and last and last.exit_code and not last.asked:
        from saferun.system import paths

        paths.write_private(os.path.abspath(path), last.verdict.encode() + b"\n")
