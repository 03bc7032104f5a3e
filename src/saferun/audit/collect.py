"""The settings audit's edge: reads what is known and the user's code, and has them judged."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.audit import judge, source_scan
from saferun.knowledge import loader
from saferun.knowledge.variable_names import OTHER_NAME
from saferun.model import CommandLine, Facts, Setting

TYPE_CHECKING = False  # importing typing for it would cost a launch 4 ms
if TYPE_CHECKING:
    from saferun.model import Finding


def remark(
    line: CommandLine,
    ours: Mapping[str, Setting],
    facts: Facts,
    environ: Mapping[str, str],
    cwd: str,
) -> str:
    """Return a launch's line about exported settings that surely do nothing, "" for none.

    Args:
        line: the user's words, for the job's code: it may read a variable of its own.
        ours: what the profile sets, and so is no longer the user's alone.
        facts: for torch's release.
        environ: the user's own.
        cwd: where the script's path starts.
    """
    if judge.nested(environ):
        return ""
    theirs = {
        name: environ[name]
        for name in judge.concerned(environ)
        if name not in ours and OTHER_NAME.get(name) not in ours
    }
    if not theirs:
        return ""
    idle = judge.idle(theirs, facts.torch, loader.variables_text())
    if not idle:
        return ""
    spoken_of, whole = source_scan.mentioned(idle, line, cwd)
    sure = {
        name: verdict
        for name, verdict in idle.items()
        if name not in spoken_of and (whole or verdict.kind != "owned")
    }
    return judge.remark(sure, facts.torch)


def findings(
    line: CommandLine, facts: Facts, environ: Mapping[str, str], cwd: str
) -> tuple[Finding, ...]:
    """Return what `saferun plan` shows about the user's settings, the script's own among them."""
    from saferun.audit import report as audit
    from saferun.audit import script_ast

    spoken_of, _ = source_scan.mentioned(judge.concerned(environ), line, cwd)
    calls = script_ast.read_script(source_scan.script_text(line, cwd))
    return audit.findings(environ, facts, calls, spoken_of)
