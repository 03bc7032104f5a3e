"""Parsed profiles, kept until their text changes: with them a launch imports no YAML parser."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Mapping
from typing import Any

from saferun import __version__
from saferun.profile.schema import Doc, Leaf
from saferun.settings import KEYS
from saferun.system import content_cache


def read(path: str, shown: str, text: str, environ: Mapping[str, str]) -> Doc | None:
    """Return a kept profile; None if there is none with this text.

    Args:
        path: the profile's file.
        shown: the profile's name in messages.
        text: the profile's present text.
        environ: variables that name the cache's directory.
    """
    try:
        kept = content_cache.read(_name(path, shown), _made_of(shown, text), environ)
        name, description, extends, match, leaves = kept
        return Doc(
            shown,
            name,
            description,
            tuple(extends),
            tuple(match),
            {key: _leaf(*leaf) for key, leaf in leaves.items()},
        )
    except (ValueError, AttributeError, TypeError):
        return None


def write(path: str, doc: Doc, text: str, environ: Mapping[str, str]) -> None:
    """Keep a parsed profile; the arguments are as for `read`."""
    content_cache.write(_name(path, doc.path), _made_of(doc.path, text), doc[1:], environ)


def _name(path: str, shown: str) -> str:
    key = crc32(f"{path}\0{shown}".encode("utf-8", "surrogateescape"))
    return f"profiles/{key:08x}"


def _made_of(shown: str, text: str) -> list[object]:
    return [__version__, crc32(repr(KEYS).encode()), shown, text]


def _leaf(value: Any, why: str, source: str, when: list[list[Any]], line: int) -> Leaf:
    value = tuple(value) if isinstance(value, list) else value
    return Leaf(value, why, source, tuple((name, wanted) for name, wanted in when), line)
