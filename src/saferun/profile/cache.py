"""Parsed profiles, kept together with their text, which is compared at every use.

So a launch does not have to import a YAML parser.
"""

from __future__ import annotations

import json
import os
from binascii import crc32
from collections.abc import Mapping
from typing import Any

from saferun import __version__
from saferun.profile.schema import Doc, Leaf
from saferun.settings import KEYS
from saferun.system import paths


def entry(path: str, shown: str, environ: Mapping[str, str]) -> str:
    """Return the file of a profile's cached form, by its path and its name in messages.

    Args:
        path: the profile's file.
        shown: its name in messages.
        environ: where the cache's directory is told.
    """
    key = crc32(f"{path}\0{shown}".encode("utf-8", "surrogateescape"))
    return os.path.join(paths.cache_dir(environ), "profiles", f"{key:08x}.json")


def _format() -> str:
    """Return what a cached entry depends on besides its text: version and table of keys."""
    return f"{__version__} {crc32(repr(KEYS).encode()):08x}"


def read(entry: str, text: str, shown: str) -> Doc | None:
    """Return the cached profile; None where there is none of this text.

    Args:
        entry: the file of the cached form.
        text: of the profile now.
        shown: its name in messages.
    """
    raw = paths.read_private(entry)
    if raw is None:
        return None
    try:
        cached: Any = json.loads(raw)
        if (cached["format"], cached["path"], cached["text"]) != (_format(), shown, text):
            return None
        name, description, extends, match, leaves = cached["doc"]
        return Doc(
            shown,
            name,
            description,
            tuple(extends),
            tuple(match),
            {key: _leaf(*leaf) for key, leaf in leaves.items()},
        )
    except (ValueError, KeyError, TypeError):
        return None


def _leaf(value: Any, why: str, source: str, when: list[list[Any]], line: int) -> Leaf:
    value = tuple(value) if isinstance(value, list) else value
    return Leaf(value, why, source, tuple((name, wanted) for name, wanted in when), line)


def write(entry: str, text: str, doc: Doc) -> None:
    """Keep a parsed profile; a directory that cannot be used is no error.

    Args:
        entry: the file, see `entry`.
        text: the profile's text, by which a changed one is recognised.
        doc: what was parsed.
    """
    content = {"format": _format(), "path": doc.path, "text": text, "doc": doc[1:]}
    paths.write_private(entry, json.dumps(content).encode())
