"""A process's request to be replaced, and the progress that it counted (inject/contract.py)."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from saferun.base import files, untrusted
from saferun.inject import contract
from saferun.journal import rank_files

_FILE_BYTES = 1 << 16
_WHY_CHARS = 300


class ReplaceRequest(NamedTuple):
    """The request that a process wrote before it ended with contract.RECYCLE_STATUS."""

    why: str
    kind: str  # the failure that made it unusable; "" for none
    progress: int  # number of completed pieces of work


def request(receipts: str | None, attempt: int) -> ReplaceRequest | None:
    """Return the request that a process of an attempt left; None if there is none.

    Args:
        receipts: directory of the receipts; None if nothing could be written.
        attempt: the number of the attempt.
    """
    for file in sorted(rank_files.of_attempt(receipts, attempt, contract.RECYCLE)):
        path = os.path.join(receipts or "", file.name)
        if found := _parse(files.read_private(path, _FILE_BYTES)):
            return found
    return None


def _parse(content: bytes | None) -> ReplaceRequest | None:
    entry = untrusted.mapping(untrusted.value(content))
    why, kind, progress = (entry.get(key) for key in ("why", "kind", "progress"))
    if not isinstance(why, str) or not isinstance(kind, str) or type(progress) is not int:
        return None
    line = "".join(c if c.isprintable() else " " for c in why[:_WHY_CHARS])
    return ReplaceRequest(" ".join(line.split()) or "it asked for it", kind, progress)


def progress(state: str | None) -> int:
    """Return how many pieces of work were counted by the processes that share a directory.

    Args:
        state: the directory; None for none.
    """
    if state is None:
        return 0
    try:
        status = os.lstat(os.path.join(state, contract.PROGRESS))
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
