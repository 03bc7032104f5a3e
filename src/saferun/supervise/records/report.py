"""The messages of a run on stderr, between its attempts and at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from saferun.diagnosis.attempt_outcome import ASKED, FAILED, REPLACED, AttemptOutcome, Decision
from saferun.diagnosis.deciding import retry_policy
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.explaining import failure_report
from saferun.supervise.attempt_end import AttemptEnd


def show(say: Callable[[str], None], ended: AttemptEnd, lines: Sequence[str]) -> None:
    """Print messages after an attempt's output, each on a line of its own.

    Args:
        say: function that takes lines for people.
        ended: how the attempt ended; its output may stop in the middle of a line (a progress bar).
        lines: the messages; may be empty.
    """
    if lines:
        tail = ended.report.tails[not ended.report.merged]
        broken = bool(tail) and not tail.endswith((b"\n", b"\r"))
        say("\n" * broken + "\n".join(lines))


def attempt_lines(
    history: Sequence[AttemptOutcome],
    decision: Decision,
    change: str,
    journal: str | None,
    host: str = "",
    diagnosis: Diagnosis | None = None,
    *,
    resumes: bool = False,
) -> list[str]:
    """Return the messages after an attempt.

    Args:
        history: all attempts, the last one included.
        decision: what happens next.
        change: description of the next attempt's mitigation; "" for none.
        journal: the run's directory; None if there is none.
        host: the host where the failure began; "" for this one.
        diagnosis: of the run, where it does not end of what its last attempt failed of.
        resumes: a setting or an argument of the script says how a later attempt goes on.
    """
    if not history:  # a node that joined a run shortly before its end
        return [f"the run ends: {decision.reason}"]
    last = history[-1]
    if decision.action == retry_policy.DONE:
        return failure_report.success(history, _search(history, journal))
    if last.way == REPLACED:
        return [failure_report.replaced(last, decision)]
    if decision.action == retry_policy.AGAIN:
        begins = "" if resumes else _begins(history, journal)
        return [failure_report.between(last, decision, change, begins)]
    if last.way == ASKED:
        return []
    host = host or os.uname().nodename
    search = _search(history, journal)
    return failure_report.failure(
        history, diagnosis or last.diagnosis, decision, host=host, journal=journal, search=search
    )


def _begins(history: Sequence[AttemptOutcome], journal: str | None) -> str:
    """Return where the next attempt begins, as a clause, with how to change that, once.

    It is "" of a search, whose trials are not done again, and of a script that has gone on by
    itself.
    """
    steps = [one.first_step for one in history if one.first_step is not None]
    if _search(history, journal) or (steps and steps[-1] > steps[0]):
        return ""
    failures = sum(one.way == FAILED for one in history)
    how = "; `saferun help retry.resume` says how to go on from one" if failures == 1 else ""
    return f" at the beginning: no checkpoint is known{how}"


def _search(history: Sequence[AttemptOutcome], journal: str | None) -> str:
    """Return a line on the trials that the run has made; "" if it has made none."""
    from saferun.journal import trials  # 2.5 ms, for which no attempt waits

    made = trials.read(journal) if journal else ()
    replaced = sum(one.way == REPLACED for one in history)
    crashed = sum(one.way == FAILED for one in history)
    return trials.headline(made, crashed, replaced) if made else ""


def asked_lines(history: Sequence[AttemptOutcome], number: int, journal: str | None) -> list[str]:
    """Return the messages of a run that a signal ended between attempts.

    Args:
        history: all attempts; may be empty.
        number: the signal.
        journal: the run's directory; None if there is none.
    """
    reason = f"{signal.Signals(number).name} asked for the end"
    if history and history[-1].diagnosis.verdict:
        decision = Decision(retry_policy.STOP, reason)
        host = os.uname().nodename
        return failure_report.failure(
            history, history[-1].diagnosis, decision, host=host, journal=journal
        )
    return [f"no attempt ran: {reason}", *([f"journal: {journal}"] if journal else [])]
