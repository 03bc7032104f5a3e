"""Parsed profiles, kept together with their text, which is compared at every use.

With them a launch does not have to import a YAML parser.
"""

from __future__ import annotations

import json
import os
from binascii import crc32
from collections.abc import Mapping
from typing import Any

from saferun import __version__
from saferun.base import files
from saferun.profile.schema import Doc, Leaf
from saferun.settings import KEYS
from saferun.system import paths


def entry(path: str, shown: str, environ: Mapping[str, str]) -> str:
    """Return the file that holds a profile's parsed form.

    Args:
        path: the profile's file.
        shown: the profile's name in messages.
        environ: variables that name the cache's directory.
    """
    key = crc32(f"{path}\0{shown}".encode("utf-8", "surrogateescape"))
    return os.path.join(paths.cache_dir(environ), "profiles", f"{key:08x}.json")


def _format() -> str:
    """Return what an entry depends on besides the text: the version and the table of keys."""
    return f"{__version__} {crc32(repr(KEYS).encode()):08x}"


def read(entry: str, text: str, shown: str) -> Doc | None:
    """Return the cached profile; None if there is none with this text.

    Args:
        entry: the file that holds the parsed form.
        text: the profile's present text.
        shown: the profile's name in messages.
    """
    raw = files.read_private(entry)
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
    """Store a parsed profile; an unusable directory is not an error.

    Args:
        entry: the file, from `entry`.
        text: the profile's text; a later, changed text is recognised by it.
        doc: the parsed profile.
    """
    content = {"format": _format(), "path": doc.path, "text": text, "doc": doc[1:]}
    paths.write_private(entry, json.dumps(content).encode())
