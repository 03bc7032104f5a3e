"""What was computed from a content, kept in the user's cache directory until the content changes.

An entry names what it was made from, which is compared at every use: no time or version decides
alone. An entry that cannot be read or written is only computed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from saferun.base import files, untrusted
from saferun.system import paths


def read(name: str, made_of: object, environ: Mapping[str, str]) -> Any:
    """Return the JSON value of an entry; None if there is none that was made of this.

    Args:
        name: the entry's file, relative to the cache directory.
        made_of: a JSON value that names everything that the result depends on.
        environ: variables that name the cache directory.
    """
    entry = untrusted.mapping(untrusted.value(files.read_private(_path(name, environ))))
    return entry.get("value") if entry.get("made_of") == made_of else None


def write(name: str, made_of: object, value: object, environ: Mapping[str, str]) -> None:
    """Store an entry; the arguments are those of `read`, and the result."""
    content = json.dumps({"made_of": made_of, "value": value})
    paths.write_private(_path(name, environ), content.encode())


def _path(name: str, environ: Mapping[str, str]) -> str:
    return os.path.join(paths.cache_dir(environ), f"{name}.json")
