"""`saferun diagnose`: the diagnosis of a log from a file or a pipe, and its text and JSON.

This module reads and prints; diagnosis/deciding/classify.py decides.
"""

from __future__ import annotations

import sys

import click

from saferun.cli.options import AS_JSON, HELP, echo, json_text
from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.deciding.known_from import known_from
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.explaining import explain as explanation
from saferun.diagnosis.explaining import failure_report
from saferun.diagnosis.explaining.explain import Account
from saferun.diagnosis.foreign import log_file
from saferun.errors import UsageError


@click.command(context_settings=HELP)
@click.argument("log", required=False, metavar="[LOG | -]", type=click.Path())
@click.option("--exit-code", type=int, metavar="N", help="Exit status of what wrote the log.")
@click.option("--explain", is_flag=True, help="Show which lines weighed how much.")
@AS_JSON
def command(log: str | None, exit_code: int | None, explain: bool, as_json: bool) -> int:
    """Explain a failure from its log: what failed, on which rank, and what to do."""
    if log is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no log given", fix="saferun diagnose train.log, or … | saferun diagnose")
    if explain:
        diagnosis, account = explained(log, exit_code)
    else:
        diagnosis, account = run(log, exit_code), None
    echo(to_json(diagnosis, account) if as_json else to_text(diagnosis, account))
    return 0


def run(path: str | None, exit_code: int | None = None) -> Diagnosis:
    """Diagnose a log.

    Args:
        path: a file, or "-" or None for standard input.
        exit_code: of the command that wrote it; negative or 128+n for a signal; None if unknown.

    Returns:
        The diagnosis.

    Raises:
        LogError: the file is missing or not readable.
    """
    known = signatures.load()
    return classify.classify(Evidence(log=log_file.read(path), exit_code=exit_code), known)


def explained(path: str | None, exit_code: int | None) -> tuple[Diagnosis, Account]:
    """Diagnose a log, and return the weight of its lines, too.

    Args:
        path: as `run` takes it.
        exit_code: of the command that wrote the log; None if unknown.

    Raises:
        LogError: the file is missing or not readable.
    """
    known = signatures.load()
    evidence = Evidence(log=log_file.read(path), exit_code=exit_code)
    reading = classify.read(evidence, known)
    return reading.diagnosis, explanation.account(reading, known)


def to_json(diagnosis: Diagnosis, account: Account | None = None) -> str:
    """Return the JSON for other programs; with an account it has the key `explain`."""
    shown = {"schema": classify.SCHEMA, **diagnosis._asdict()}
    del shown["stack"], shown["gpu"]  # the keys of this JSON are fixed
    shown["nearest"] = [near._asdict() for near in diagnosis.nearest]
    if account is not None:
        shown["explain"] = explanation.as_document(account)
    return json_text(shown)


_VERDICTS = {
    "retry": "try again (it may be temporary)",
    "mitigate": "try again with a setting changed",
    "stop-user": "do not retry: code, data, arguments or packages need a change",
    "stop-hardware": "do not retry: the machine needs attention",
    "unknown": "nothing is known about it",
}


def to_text(diagnosis: Diagnosis, account: Account | None = None) -> str:
    """Return a few lines for people; an account of the log's lines follows if there is one."""
    rank = "" if diagnosis.root_rank is None else f" (rank {diagnosis.root_rank})"
    verdict = "nothing failed" if diagnosis.kind == "no-failure" else _VERDICTS[diagnosis.verdict]
    lines = [f"{diagnosis.kind}{rank}: {verdict}"]
    if diagnosis.root_line:
        lines.append(f"  {diagnosis.root_line}")
    lines += failure_report.where(diagnosis)
    lines += [diagnosis.explanation, diagnosis.advice]
    lines += failure_report.half_answer(diagnosis) + known_from(diagnosis.decided_by)
    if diagnosis.mitigations:
        lines.append(f"mitigations, in this order: {', '.join(diagnosis.mitigations)}")
    lines += [f"see {reference}" for reference in diagnosis.references]
    if account is not None:
        lines += ["", *explanation.as_lines(account)]
    return "\n".join(lines)
