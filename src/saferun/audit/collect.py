"""The settings audit's input: read the data and the user's code, and pass both to the audit."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.audit import judge, report, script_ast, source_scan
from saferun.base import proc
from saferun.knowledge import loader
from saferun.knowledge.variable_names import OTHER_NAME
from saferun.model import Finding, MachineFacts, Request, Setting


def remark(
    request: Request,
    ours: Mapping[str, Setting],
    facts: MachineFacts,
    environ: Mapping[str, str],
    cwd: str,
) -> str:
    """Return a launch's line about exported settings that certainly have no effect.

    Args:
        request: the user's command line, used to find the job's code, which may read other
            variables.
        ours: the variables that the profile sets; they are not audited as the user's own.
        facts: the machine; only torch's release is used.
        environ: the user's own environment.
        cwd: the directory that the script's path is relative to.

    Returns:
        The line; "" if there is no such setting.
    """
    if judge.nested(environ):
        return ""
    theirs = {
        name: environ[name]
        for name in judge.audited(environ)
        if name not in ours and OTHER_NAME.get(name) not in ours
    }
    if not theirs:
        return ""
    idle = judge.idle(theirs, facts.torch, loader.variables_text())
    if not idle:
        return ""
    found = source_scan.search(idle, request, cwd)
    certain = {
        name: reading
        for name, reading in idle.items()
        if name not in found.names and (found.complete or reading.kind != "owned")
    }
    return judge.remark(certain, facts.torch)


def findings(
    request: Request, facts: MachineFacts, environ: Mapping[str, str], cwd: str
) -> tuple[Finding, ...]:
    """Return what `saferun plan` shows about the user's settings, including the script's own.

    Args:
        request: the user's command line, used to find the job's code.
        facts: torch's release and the GPUs.
        environ: the user's own environment.
        cwd: the directory that the script's path is relative to.

    Returns:
        The findings, problems first.
    """
    found = source_scan.search(judge.audited(environ), request, cwd)
    calls = script_ast.read_script(source_scan.script_text(request, cwd))
    adapters = proc.names("/sys/class/infiniband")  # InfiniBand and RoCE devices
    return report.findings(environ, facts, calls, found.names, adapters)
