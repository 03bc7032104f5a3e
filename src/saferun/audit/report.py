"""Pure: the settings audit. Do the settings do anything, and do they do what they promise?

    findings(environ, facts) -> what `saferun doctor` and `saferun plan` show

Who reads a variable is data from the released libraries (knowledge/variables.yaml); what it does
was written by hand, with sources (knowledge/settings.yaml); what undoes what is in conflicts.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.audit import conflicts, variable_index
from saferun.audit.judge import DOES_NOTHING, Verdict, concerned, judge
from saferun.audit.script_ast import Calls
from saferun.audit.variable_index import Reader
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Facts, Finding
from saferun.system import redact

AREA = "settings"
LONGEST = 80  # characters of a value that are shown


class _Known(NamedTuple):
    """What a setting is judged by."""

    text: str  # of variables.yaml
    settings: Mapping[str, Any]  # of settings.yaml
    torch: str | None
    calls: Calls | None
    spoken_of: Collection[str]


def findings(
    environ: Mapping[str, str],
    facts: Facts,
    calls: Calls | None = None,
    spoken_of: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Return what there is to say about every setting of an environment, problems first.

    Args:
        environ: the user's own.
        facts: for torch's release and the GPUs.
        calls: what the script does itself, where it is known (`scriptcalls.read_script`).
        spoken_of: names of which the job's own code speaks.
    """
    settings = loader.load_settings(environ)["settings"]
    known = _Known(loader.variables_text(), settings, facts.torch, calls, spoken_of)
    found = [_printable(one) for one in conflicts.findings(environ, facts, settings)]
    told = " ".join(finding.what for finding in found)
    for name in concerned(environ):
        one = _about(name, environ[name], known)
        if one.level == PROBLEM or name not in told:
            found.append(one)
    return tuple(sorted(found, key=lambda finding: (PROBLEM, NOTE, OK).index(finding.level)))


def _about(name: str, value: str, known: _Known) -> Finding:
    verdict, entry = judge(name, known.torch, known.text), known.settings.get(name, {})
    shown = _shown(name, value)
    if ("dead" in entry and "quiet" in entry) or verdict.kind in DOES_NOTHING:
        if name in known.spoken_of and name not in (known.calls.assigned if known.calls else ()):
            words = "of libraries none reads it; the job's own code names it"
            return Finding(OK, AREA, f"{shown} is for code of your own", words, "")
        return _idle(shown, name, verdict, entry, known)
    if verdict.kind != "read" and ("dead" in entry or not entry):
        return _strange(shown, name, verdict, known.text)
    level, what, fix = _weighed(name, value, verdict, known)
    told = [entry.get("does", ""), f"read by {entry.get('reader') or _who(verdict.by)}"]
    told += [f"{key}: {entry[key]}" for key in ("cost", "overridden") if key in entry]
    detail = "; ".join(filter(None, told)) + _source(entry)
    return Finding(level, AREA, f"{shown}{what}", detail, fix)


def _shown(name: str, value: str) -> str:
    """Return NAME=value as a shell would take it, on one line, without what is secret."""
    told = redact.Masker({name: value}, ()).setting(name, value)
    plain = told[:LONGEST].encode("unicode_escape").decode()
    return f"{name}={shlex.quote(plain)}" + ("…" if len(told) > LONGEST else "")


def _printable(finding: Finding) -> Finding:
    """Keep what a value holds from breaking a line."""
    what = "".join(letter if letter.isprintable() else "?" for letter in finding.what)
    return finding._replace(what=what)


def _source(entry: Mapping[str, Any]) -> str:
    return f" <{entry['source']}>" if "source" in entry else ""


def _idle(
    shown: str, name: str, verdict: Verdict, entry: Mapping[str, Any], known: _Known
) -> Finding:
    """Nothing reads it here."""
    if "dead" in entry:
        detail, level = entry["dead"] + _source(entry), NOTE if entry.get("quiet") else PROBLEM
        return Finding(level, AREA, f"{shown} has no reader", detail, entry["fix"])
    if verdict.kind == "misspelt":
        fix = f"if {verdict.near} is meant, write that"
        detail = "neither torch nor a library that comes with it reads such a name"
        return Finding(PROBLEM, AREA, f"{shown} has no known reader", detail, fix)
    what = f"{shown} has no reader in torch {known.torch}"
    if verdict.kind == "gone":
        detail = f"{verdict.near} was the last to read it ({_where(verdict.by[0])})"
        return Finding(PROBLEM, AREA, what, detail, "leave it out")
    if verdict.kind == "later":
        detail = f"{verdict.near} is the first that reads it ({_where(verdict.by[0])})"
        return Finding(PROBLEM, AREA, what, detail, f"it needs {verdict.near}")
    detail = "of libraries, only torch could read a name like this; code of your own may"
    fix = _similar(name, known.text) or "leave it out, if it is not yours"
    return Finding(NOTE, AREA, what, detail, fix)


def _strange(shown: str, name: str, verdict: Verdict, text: str) -> Finding:
    if verdict.kind == "foreign":
        detail = f"read by {verdict.near or 'other programs, or for building'}"
        return Finding(OK, AREA, f"{shown} is not torch's nor NCCL's own", detail, "")
    detail = "it may be read by other code"
    return Finding(NOTE, AREA, f"{shown} is not known to us", detail, _similar(name, text))


def _similar(name: str, text: str) -> str:
    import difflib

    words = sorted(name.split("_"))  # NCCL_DISABLE_IB
    near = [known for known in variable_index.names(text) if sorted(known.split("_")) == words]
    near += difflib.get_close_matches(name, variable_index.names(text), 1, 0.85)
    return f"a similar name: {near[0]}" if near else ""


def _weighed(name: str, value: str, verdict: Verdict, known: _Known) -> tuple[str, str, str]:
    """Return level, what is to be said behind the value, and the fix."""
    entry = known.settings.get(name, {})
    beaten = conflicts.beaten(name, value, entry, known.calls) if known.calls else ""
    if beaten:
        return PROBLEM, f": {beaten}", "set it there, or take it out there"
    wrong = _misread(value, verdict.by)
    if wrong:
        return PROBLEM, f": {wrong[0]}", wrong[1]
    warnings = entry.get("warn", {})
    warning = warnings.get(value, warnings.get("*"))
    if warning:
        return warning[0], f": {warning[1]}", warning[2]
    if value in entry.get("idle", {}):
        return OK, f" changes nothing: {entry['idle'][value]}", ""
    if _renamed(entry, known):
        return NOTE, f": {entry['newer']} is its newer name", f"export {entry['newer']} instead"
    return OK, "", ""


def _renamed(entry: Mapping[str, Any], known: _Known) -> bool:
    """Whether this torch takes the newer name as well as the old one."""
    if "newer" not in entry or known.torch is None:
        return False
    return judge(entry["newer"], known.torch, known.text).kind == "read"


def _misread(value: str, by: Sequence[Reader]) -> tuple[str, str] | None:
    """Return what is wrong where torch takes a value for its opposite, and the fix."""
    ways = {file for reader in by for file in reader.files if file.startswith("=")}
    if ways == {"=1"} and value.lower() in ("true", "yes", "on", "y", "t"):
        return f"{value} counts as off, since torch compares it with 1", "write 1"
    if ways == {"=any"} and value.lower() in ("0", "false", "no", "off"):
        return f"{value} turns it on, since torch only asks whether it is set", "unset it"
    return None


def _who(by: Sequence[Reader]) -> str:
    """Return who reads it: "torch 2.4.0 to 2.15.0 (_inductor/config.py)"."""
    return ", ".join(_reading(reader) for reader in by)


def _reading(reader: Reader) -> str:
    first, last = reader.releases[0], reader.releases[-1]
    span = first if first == last else f"{first} to {last}"
    return f"{reader.library} {span} ({_where(reader)})"


def _where(reader: Reader) -> str:
    return ", ".join(file for file in reader.files if not file.startswith("="))
