"""The cures that are remembered, for people: shown with secrets masked, forgotten by script."""

from __future__ import annotations

import os
from collections.abc import Mapping

from saferun import memory
from saferun.errors import UnavailableError, UsageError
from saferun.masking import Masker
from saferun.memory import Entry
from saferun.schema import nearest


def listed(environ: Mapping[str, str]) -> tuple[Entry, ...]:
    """Return what is remembered, with secrets in scripts' arguments masked."""
    masker = Masker(environ, ())
    return tuple(
        e if e.arguments is None else e._replace(arguments=tuple(masker.words(e.arguments)))
        for e in memory.load(environ)
    )


def forget(environ: Mapping[str, str], script: str | None, cwd: str) -> tuple[Entry, ...]:
    """Forget the cures of a script, or all of them; return what was forgotten.

    Args:
        environ: tells where they are kept.
        script: its path, or a module's name; None for all.
        cwd: what a relative path starts from.

    Raises:
        UsageError: nothing is remembered for this script.
        UnavailableError: they cannot be written.
    """
    known = memory.load(environ)
    gone = tuple(e for e in known if script is None or _is_of(e.key.script, script, cwd))
    if script is not None and not gone:
        scripts = list(dict.fromkeys(entry.key.script for entry in known))
        mend = nearest(os.path.realpath(os.path.join(cwd, script)), scripts)
        raise UsageError(f"no cure is remembered for `{script}`", mend=mend)
    if gone and not memory.save(environ, memory.forget(known, gone)):
        where = memory.path(environ)
        raise UnavailableError("cures cannot be forgotten", where=where, mend="mend its mode")
    return gone


def _is_of(known: str, script: str, cwd: str) -> bool:
    path = os.path.realpath(os.path.join(cwd, script))
    return known in (script, path, f"-m {script}")
