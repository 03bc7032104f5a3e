"""The settings audit's edge: reads what is known and the user's script, and has them judged."""

from __future__ import annotations

import os
from collections.abc import Mapping

from saferun import envvars, knowledge, verdicts
from saferun.model import CommandLine, Facts, Setting

TYPE_CHECKING = False  # importing typing for it would cost a launch 4 ms
if TYPE_CHECKING:
    from saferun.findings import Finding

MOST_BYTES = 1 << 20  # of a script


def remark(
    line: CommandLine,
    ours: Mapping[str, Setting],
    facts: Facts,
    environ: Mapping[str, str],
    cwd: str,
) -> str:
    """Return a launch's line about exported settings that surely do nothing, "" for none.

    Args:
        line: the user's words, for the script: it may read a variable of its own.
        ours: what the profile sets, and so is no longer the user's alone.
        facts: for torch's release.
        environ: the user's own.
        cwd: where the script's path starts.
    """
    if verdicts.nested(environ):
        return ""
    theirs = {
        name: environ[name]
        for name in verdicts.concerned(environ)
        if name not in ours and envvars.TWINS.get(name) not in ours
    }
    if not theirs:
        return ""
    text = knowledge.variables_text()
    return verdicts.remark(theirs, facts, text, lambda name: name in script_text(line, cwd))


def findings(
    line: CommandLine, facts: Facts, environ: Mapping[str, str], cwd: str
) -> tuple[Finding, ...]:
    """Return what `saferun plan` shows about the user's settings, the script's own among them."""
    from saferun import audit, scriptcalls

    return audit.findings(environ, facts, scriptcalls.read_script(script_text(line, cwd)))


def script_text(line: CommandLine, cwd: str) -> str:
    """Return the text of the script; "" for a module, and for what cannot be read as a file."""
    if line.script is None or "module" in line.given:
        return ""
    path = os.path.join(cwd, line.script)
    try:
        if not os.path.isfile(path):  # a pipe would be emptied, or never end
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES)
    except (OSError, ValueError):
        return ""
