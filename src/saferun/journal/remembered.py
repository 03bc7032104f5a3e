"""The remembered mitigations, for people: shown with secrets masked, forgotten by script."""

from __future__ import annotations

import os
from collections.abc import Mapping

from saferun.errors import UnavailableError, UsageError
from saferun.journal import mitigation_history
from saferun.journal.mitigation_history import Entry
from saferun.profile.schema import nearest
from saferun.system.redact import Masker


def listed(environ: Mapping[str, str]) -> tuple[Entry, ...]:
    """Return what is remembered, with secrets in scripts' arguments masked."""
    masker = Masker(environ, ())
    return tuple(
        e if e.arguments is None else e._replace(arguments=tuple(masker.words(e.arguments)))
        for e in mitigation_history.load(environ)
    )


def forget(environ: Mapping[str, str], script: str | None, cwd: str) -> tuple[Entry, ...]:
    """Forget the mitigations of a script, or all of them; return what was forgotten.

    Args:
        environ: tells where they are kept.
        script: its path, or a module's name; None for all.
        cwd: what a relative path starts from.

    Raises:
        UsageError: nothing is remembered for this script.
        UnavailableError: they cannot be written.
    """
    known = mitigation_history.load(environ)
    gone = tuple(e for e in known if script is None or _is_of(e.key.script, script, cwd))
    if script is not None and not gone:
        scripts = list(dict.fromkeys(entry.key.script for entry in known))
        fix = nearest(os.path.realpath(os.path.join(cwd, script)), scripts)
        raise UsageError(f"no mitigation is remembered for `{script}`", fix=fix)
    if gone and not mitigation_history.save(environ, mitigation_history.forget(known, gone)):
        where = mitigation_history.path(environ)
        raise UnavailableError("mitigations cannot be forgotten", where=where, fix="fix its mode")
    return gone


def _is_of(known: str, script: str, cwd: str) -> bool:
    path = os.path.realpath(os.path.join(cwd, script))
    return known in (script, path, f"-m {script}")
