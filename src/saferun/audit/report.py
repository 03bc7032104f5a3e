"""Pure: the settings audit. Does each setting have an effect, and is it the intended one?

    findings(environ, facts) -> what `saferun doctor` and `saferun plan` show

Who reads a variable is data from the released libraries (knowledge/variables.yaml). What it does
was written by hand, with sources (knowledge/variable_effects.yaml). Settings that contradict each
other are in conflicts.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from saferun.audit import conflicts, effects, variable_index
from saferun.audit.effects import Effect, Remark
from saferun.audit.judge import NO_EFFECT, Reading, audited, judge
from saferun.audit.script_ast import Calls
from saferun.audit.variable_index import Reader
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM, Finding, MachineFacts
from saferun.system import redact
from saferun.system.printable import printable
from saferun.system.spelling import nearest

AREA = "settings"
LONGEST = 80  # most characters of a value that are shown


class _Known(NamedTuple):
    """The data that a setting is judged by."""

    text: str  # all of variables.yaml
    effects: Mapping[str, Effect]
    torch: str | None
    calls: Calls | None
    in_code: Collection[str]


def findings(
    environ: Mapping[str, str],
    facts: MachineFacts,
    calls: Calls | None = None,
    in_code: Collection[str] = (),
    adapters: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Return a finding for every setting of an environment and for every conflict.

    Args:
        environ: the user's own environment.
        facts: torch's release and the GPUs.
        calls: the settings that the script makes itself, if known (`script_ast.read_script`).
        in_code: names of variables that the job's own code contains.
        adapters: names of the machine's InfiniBand and RoCE devices.

    Returns:
        The findings, problems first.
    """
    known = _Known(loader.variables_text(), effects.load(), facts.torch, calls, in_code)
    found = [
        one._replace(what=printable(one.what))
        for one in conflicts.findings(environ, facts, known.effects, adapters)
    ]
    conflicting = " ".join(finding.what for finding in found)
    for name in sorted({*audited(environ), *(environ.keys() & known.effects.keys())}):
        one = _about(name, environ[name], known)
        if one.level == PROBLEM or name not in conflicting:
            found.append(one)
    return tuple(sorted(found, key=lambda finding: (PROBLEM, NOTE, OK).index(finding.level)))


def _about(name: str, value: str, known: _Known) -> Finding:
    reading, entry = judge(name, known.torch, known.text), known.effects.get(name, effects.UNKNOWN)
    shown = _shown(name, value)
    if entry.until and not _is_later(known.torch, entry.until):
        entry = entry._replace(dead="", fix="")
    if (entry.dead and (entry.quiet or entry.until)) or reading.kind in NO_EFFECT:
        if name in known.in_code and name not in (known.calls.assigned if known.calls else ()):
            detail = "of libraries none reads it; the job's own code names it"
            return Finding(OK, AREA, f"{shown} is for code of your own", detail)
        return _idle(shown, name, reading, entry, known)
    if reading.kind != "read" and (entry.dead or entry == effects.UNKNOWN):
        return _unknown(shown, name, reading, known.text)
    level, what, fix = _remark(name, value, reading, known)
    parts = [entry.does, f"read by {entry.reader or _who(reading.by)}"]
    parts += [f"cost: {entry.cost}"] if entry.cost else []
    parts += [f"overridden: {entry.overridden}"] if entry.overridden else []
    detail = "; ".join(filter(None, parts)) + _source(entry)
    return Finding(level, AREA, f"{shown}{what}", detail, fix)


def _is_later(torch: str | None, release: str) -> bool:
    return torch is not None and variable_index.version(torch) > variable_index.version(release)


def _shown(name: str, value: str) -> str:
    """Return NAME=value quoted for a shell, on one line and without secrets."""
    masked = redact.Masker({name: value}, ()).setting(name, value)
    plain = masked[:LONGEST].encode("unicode_escape").decode()
    return f"{name}={shlex.quote(plain)}" + ("…" if len(masked) > LONGEST else "")


def _source(entry: Effect) -> str:
    return f" <{entry.source}>" if entry.source else ""


def _idle(shown: str, name: str, reading: Reading, entry: Effect, known: _Known) -> Finding:
    """Return the finding about a setting that nothing reads here."""
    if entry.dead:
        level = NOTE if entry.quiet else PROBLEM
        what = f"{shown} does nothing" if entry.until else f"{shown} has no reader"
        return Finding(level, AREA, what, entry.dead + _source(entry), entry.fix)
    if reading.kind == "misspelt":
        fix = f"if {reading.near} is meant, write that"
        detail = "neither torch nor a library that comes with it reads such a name"
        return Finding(PROBLEM, AREA, f"{shown} has no known reader", detail, fix)
    what = f"{shown} has no reader in torch {known.torch}"
    if reading.kind == "gone":
        detail = f"{reading.near} was the last to read it ({_where(reading.by[0])})"
        return Finding(PROBLEM, AREA, what, detail, "leave it out")
    if reading.kind == "later":
        detail = f"{reading.near} is the first that reads it ({_where(reading.by[0])})"
        return Finding(PROBLEM, AREA, what, detail, f"it needs {reading.near}")
    detail = "of libraries, only torch could read a name like this; code of your own may"
    fix = _similar(name, known.text) or "leave it out, if it is not yours"
    return Finding(NOTE, AREA, what, detail, fix)


def _unknown(shown: str, name: str, reading: Reading, text: str) -> Finding:
    """Return the finding about a setting that may have a reader outside of our data."""
    if reading.kind == "foreign":
        detail = (
            f"read by {reading.near or 'other programs, other builds of torch, or for building'}"
        )
        return Finding(OK, AREA, f"{shown} is not for this torch or its NCCL", detail)
    detail = "it may be read by other code"
    return Finding(NOTE, AREA, f"{shown} is not known to us", detail, _similar(name, text))


def _similar(name: str, text: str) -> str:
    known = (*variable_index.names(text), *variable_index.listed(text, "driver"))
    parts = set(name.split("_"))
    # The words are in another order (NCCL_DISABLE_IB for NCCL_IB_DISABLE), or one is missing or
    # added.
    near = [other for other in known if set(other.split("_")) == parts]
    near += filter(None, [nearest(name, known, 0.85)])
    near += [other for other in known if len(parts ^ set(other.split("_"))) == 1 and len(parts) > 2]
    return f"a similar name: {near[0]}" if near else ""


def _remark(name: str, value: str, reading: Reading, known: _Known) -> Remark:
    """Return the remark about a setting that has an effect; it depends on the value."""
    entry = known.effects.get(name, effects.UNKNOWN)
    overruled = conflicts.overruled(name, value, entry, known.calls) if known.calls else ""
    if overruled:
        return Remark(PROBLEM, f": {overruled}", "set it there, or take it out there")
    wrong = _misread(value, reading.by)
    if wrong:
        return Remark(PROBLEM, f": {wrong[0]}", wrong[1])
    warning = entry.warn.get(value, entry.warn.get("*"))
    if warning:
        return warning._replace(what=f": {warning.what}")
    if value in entry.idle:
        return Remark(OK, f" changes nothing: {entry.idle[value]}", "")
    if _renamed(entry, known):
        return Remark(NOTE, f": {entry.newer} is its newer name", f"export {entry.newer} instead")
    return Remark(OK, "", "")


def _renamed(entry: Effect, known: _Known) -> bool:
    """Return whether this torch reads the newer name as well as the old one."""
    if not entry.newer or known.torch is None:
        return False
    return judge(entry.newer, known.torch, known.text).kind == "read"


def _misread(value: str, by: Sequence[Reader]) -> tuple[str, str] | None:
    """Return the error and its fix if torch takes a value for its opposite."""
    ways = {file for reader in by for file in reader.files if file.startswith("=")}
    if ways == {"=1"} and value.lower() in ("true", "yes", "on", "y", "t"):
        return f"{value} counts as off, since torch compares it with 1", "write 1"
    if ways == {"=any"} and value.lower() in ("0", "false", "no", "off"):
        return f"{value} turns it on, since torch only asks whether it is set", "unset it"
    return None


def _who(by: Sequence[Reader]) -> str:
    """Return the readers of a variable as text: "torch 2.4.0 to 2.15.0 (_inductor/config.py)"."""
    shown = []
    for reader in by:
        first, last = reader.releases[0], reader.releases[-1]
        span = first if first == last else f"{first} to {last}"
        shown.append(f"{reader.library} {span} ({_where(reader)})")
    return ", ".join(shown)


def _where(reader: Reader) -> str:
    return ", ".join(file for file in reader.files if not file.startswith("="))
