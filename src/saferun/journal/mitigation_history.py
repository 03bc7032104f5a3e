"""The history of mitigations that led to success.

It serves the next start of the same script on the same machine. Without it, a run starts as the
first one did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saferun.errors import UsageError
from saferun.journal.history_file import HistoryFile
from saferun.profile.schema import nearest
from saferun.system.redact import Masker

RETRY_WITHOUT_S = 7 * 24 * 3600.0  # after this time a run is tried without a mitigation that costs
KEPT_S = 3600.0  # within this time the same mitigation is not stored again


class Key(NamedTuple):
    """The case of a mitigation; with another value in any field it is not used."""

    script: str  # real path, or a module's name
    gpu: str  # the GPUs' product names; "" without a GPU
    torch: str  # "2.13.0+cpu"; "" if unknown
    driver: str  # "570.86.15"; "" if unknown


class Entry(NamedTuple):
    """One mitigation that helped."""

    key: Key
    mitigation: str
    kind: str  # the failure that it avoided
    arguments: tuple[str, ...] | None  # the script's, for a mitigation that costs; None: any
    at: float  # seconds since the epoch


Entries = tuple[Entry, ...]


def _entry(item: Mapping[str, Any]) -> Entry:
    key = Key(**{name: str(item["key"][name]) for name in Key._fields})
    given = item["arguments"]
    arguments = None if given is None else tuple(str(word) for word in given)
    return Entry(key, str(item["mitigation"]), str(item["kind"]), arguments, float(item["at"]))


HISTORY = HistoryFile("mitigations", "mitigations", _entry)
path, load, change = HISTORY.path, HISTORY.load, HISTORY.change


def keep(environ: Mapping[str, str], new: Iterable[Entry]) -> None:
    """Add mitigations that helped, unless they were just added: all nodes of a run do so.

    Args:
        environ: variables that give the history's directory.
        new: mitigations that helped, with their times.

    Raises:
        OSError: they are missing, and cannot be added.
    """
    entries = tuple(new)

    if _holds_all(load(environ), entries):
        return
    try:
        change(environ, lambda old: old if _holds_all(old, entries) else merge(old, entries))
    except OSError:  # a thousand nodes that end at once compete for the lock
        if not _holds_all(load(environ), entries):
            raise


def _holds_all(known: Entries, new: Entries) -> bool:
    kept = {(e.key, e.mitigation, e.arguments): e.at for e in known}
    ages = (abs(e.at - kept.get((e.key, e.mitigation, e.arguments), 0.0)) for e in new)
    return all(age < KEPT_S for age in ages)


def recall(entries: Iterable[Entry], key: Key, arguments: tuple[str, ...], now_s: float) -> Entries:
    """Return the mitigations to apply from the start, oldest first.

    Args:
        entries: the history.
        key: the case of the run that starts.
        arguments: its script's arguments.
        now_s: seconds since the epoch.
    """
    return tuple(
        entry
        for entry in sorted(entries, key=lambda entry: entry.at)
        if entry.key == key and (entry.arguments is None or _holds(entry, arguments, now_s))
    )


def _holds(entry: Entry, arguments: tuple[str, ...], now_s: float) -> bool:
    return entry.arguments == arguments and 0 <= now_s - entry.at < RETRY_WITHOUT_S


def merge(entries: Iterable[Entry], new: Iterable[Entry]) -> Entries:
    """Return the entries, in which new ones replace those for the same case.

    Args:
        entries: the history.
        new: mitigations that were chosen in this run. They do not include those applied from the
            history, which keep their times: otherwise a run would never be tried again without a
            mitigation that costs.
    """
    kept = {(e.key, e.mitigation, e.arguments): e for e in entries}
    kept.update({(e.key, e.mitigation, e.arguments): e for e in new})
    return tuple(kept.values())


# --- for people ----------------------------------------------------------------------------------


def listed(environ: Mapping[str, str]) -> Entries:
    """Return the history with secrets in scripts' arguments masked."""
    masker = Masker(environ, ())
    return tuple(
        e if e.arguments is None else e._replace(arguments=tuple(masker.argv(e.arguments)))
        for e in load(environ)
    )


def clear(environ: Mapping[str, str], script: str | None, cwd: str) -> Entries:
    """Remove the mitigations of a script, or all of them; return the removed ones.

    Args:
        environ: variables that give the history's directory.
        script: the script's path, or a module's name; None for all.
        cwd: the directory that a relative path starts from.

    Raises:
        UsageError: there are none for this script.
        UnavailableError: the history cannot be changed.
    """

    def is_meant(entry: Entry) -> bool:
        return script is None or _is_of(entry.key.script, script, cwd)

    before = HISTORY.forget(environ, lambda known: tuple(e for e in known if not is_meant(e)))
    gone = tuple(filter(is_meant, before))
    if script is not None and not gone:
        scripts = list(dict.fromkeys(entry.key.script for entry in before))
        fix = nearest(os.path.realpath(os.path.join(cwd, script)), scripts)
        raise UsageError(f"no mitigation in the history is for `{script}`", fix=fix)
    return gone


def _is_of(known: str, script: str, cwd: str) -> bool:
    return known in (script, os.path.realpath(os.path.join(cwd, script)), f"-m {script}")
