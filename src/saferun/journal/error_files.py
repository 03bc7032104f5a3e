"""The exceptions that ranks wrote beside their receipts (inject/hooks/excepthook.py), masked.

A rank knows no secrets but its own, so it writes its exception as it is. At the attempt's end,
before anything is concluded from the files, they are masked where they are: whole texts, since a
single line does not show that the lines above it named a password.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = re.compile(r"a(\d{1,9})-r(\d{1,9})-rank(\d{1,9}|none)-pid\d{1,9}\.error\.json", re.ASCII)
MAX_BYTES = 1 << 20  # of each file; what is longer is cut
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def mask(directory: str | None, attempt: int, masked: Callable[[str], str]) -> None:
    """Mask the error files of an attempt; one that cannot be masked is removed.

    Args:
        directory: of the receipts; None where there is none.
        attempt: the number of the attempt.
        masked: returns a text without secrets.
    """
    for name in _names(directory, attempt):
        path = os.path.join(directory or "", name)
        try:
            _mask(path, masked)
        except (OSError, ValueError, RecursionError):
            _remove(path)


def _names(directory: str | None, attempt: int) -> list[str]:
    try:
        names = os.listdir(directory) if directory else []
    except OSError:
        return []
    return [n for n in names if (found := NAME.fullmatch(n)) and int(found[1]) == attempt]


def _mask(path: str, masked: Callable[[str], str]) -> None:
    """Rewrite a file in its place, which a full disk allows: what is masked is no longer.

    Raises:
        OSError: it cannot be opened or written.
        ValueError: it is not ours, or is not a file.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError(path)
        before = os.pread(descriptor, MAX_BYTES, 0)
        after = _clean(before, masked)
        if after != before or status.st_size > len(before):
            written = os.pwrite(descriptor, after, 0)
            os.ftruncate(descriptor, written)
    finally:
        os.close(descriptor)


def _clean(content: bytes, masked: Callable[[str], str]) -> bytes:
    """Return JSON with every text in it masked; what is no JSON is masked as one text."""
    try:
        tree = json.loads(content)
    except ValueError:
        return masked(content.decode("utf-8", "replace")).encode()
    return json.dumps(_walk(tree, masked)).encode()


def _walk(tree: Any, masked: Callable[[str], str]) -> Any:
    if isinstance(tree, str):
        return masked(tree)
    if isinstance(tree, list):
        return [_walk(item, masked) for item in tree]
    if isinstance(tree, dict):
        return {masked(key): _walk(value, masked) for key, value in tree.items()}
    return tree


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it is gone, or not ours
