"""Mitigations that led to success, remembered for the next start of the same script on the same
machine.

One small file below the user's state directory, read and written whole: `mitigations.json`. What
cannot be read or written is no error: a run without memory starts as the first one did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saferun.system import paths

SCHEMA = 1
FILE = "mitigations.json"
RETRY_WITHOUT_S = 7 * 24 * 3600.0  # a mitigation that costs is tried without again after this time
ENTRIES = 500  # the newest are kept


class Key(NamedTuple):
    """What a mitigation holds for; with any other value here it is forgotten by not being found."""

    script: str  # its real path, or a module's name
    gpu: str  # the GPUs' product names; "" without a GPU
    torch: str  # "2.13.0+cpu"; "" where unknown
    driver: str  # "570.86.15"; "" where unknown


class Entry(NamedTuple):
    """One mitigation that helped."""

    key: Key
    mitigation: str
    kind: str  # the failure that it cured
    arguments: tuple[str, ...] | None  # the script's, for a mitigation that costs; None: any
    at: float  # seconds since the epoch


def path(environ: Mapping[str, str]) -> str:
    """Return where the user's mitigations are kept."""
    return os.path.join(paths.state_dir(environ), FILE)


def load(environ: Mapping[str, str]) -> tuple[Entry, ...]:
    """Return all that is remembered; nothing where the file is missing, cut or not ours."""
    import json

    content = paths.read_private(path(environ))
    try:
        document = json.loads(content or b"null")
        if document["schema"] != SCHEMA:
            return ()
        return tuple(_entry(item) for item in document["mitigations"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def save(environ: Mapping[str, str], entries: Iterable[Entry]) -> bool:
    """Keep these entries and no others; say whether that worked."""
    import json

    newest = sorted(entries, key=lambda entry: entry.at)[-ENTRIES:]
    items = [{**e._asdict(), "key": e.key._asdict()} for e in newest]
    content = json.dumps({"schema": SCHEMA, "mitigations": items}, indent=1)
    return paths.write_private(path(environ), content.encode())


def _entry(item: Mapping[str, Any]) -> Entry:
    key = Key(**{name: str(item["key"][name]) for name in Key._fields})
    given = item["arguments"]
    arguments = None if given is None else tuple(str(word) for word in given)
    return Entry(key, str(item["mitigation"]), str(item["kind"]), arguments, float(item["at"]))


def recall(
    entries: Iterable[Entry], key: Key, arguments: tuple[str, ...], now_s: float
) -> tuple[Entry, ...]:
    """Return what is to be applied from the start, oldest first.

    Args:
        entries: all that is remembered.
        key: of the run that starts.
        arguments: of its script.
        now_s: seconds since the epoch.
    """
    return tuple(
        entry
        for entry in sorted(entries, key=lambda entry: entry.at)
        if entry.key == key and (entry.arguments is None or _holds(entry, arguments, now_s))
    )


def _holds(entry: Entry, arguments: tuple[str, ...], now_s: float) -> bool:
    return entry.arguments == arguments and 0 <= now_s - entry.at < RETRY_WITHOUT_S


def learn(entries: Iterable[Entry], new: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries with the new ones in the place of those that say the same.

    Args:
        entries: all that is remembered.
        new: mitigations that were chosen in this run. One that was applied from memory is none of
        them:
            it keeps its time, or one that costs would never be tried without again.
    """
    kept = {(e.key, e.mitigation, e.arguments): e for e in entries}
    kept.update({(e.key, e.mitigation, e.arguments): e for e in new})
    return tuple(kept.values())


def forget(entries: Iterable[Entry], gone: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries without those."""
    dropped = {(e.key, e.mitigation, e.arguments) for e in gone}
    return tuple(e for e in entries if (e.key, e.mitigation, e.arguments) not in dropped)
