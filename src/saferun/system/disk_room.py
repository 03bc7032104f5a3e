"""Whether a file system has room for another checkpoint, and a wait until it has."""

from __future__ import annotations

import os
import re
import signal
import time

_LEAST = 1 << 20  # bytes; with less a script cannot even write its log
_EVERY_S = 0.1  # one statvfs each
_SPECIAL = re.compile(r"[*?[]")  # special characters of glob(7)


def folder_of(pattern: str) -> str:
    """Return the directory of the matches of a glob(7) pattern, or its first existing parent.

    >>> folder_of("/proc/self/checkpoint-*/x.pt"), folder_of("/nowhere/at/all/*")
    ('/proc/self', '/')
    """
    plain = _SPECIAL.split(os.path.expanduser(pattern))[0]
    folder = os.path.dirname(os.path.abspath(plain + "x"))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def has(folder: str, size: int) -> bool:
    """Return whether a file of a size in bytes can be written; True if unknown."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return True
    files = facts.f_favail > 0 or facts.f_files == 0  # some file systems do not count files
    return files and facts.f_bavail * facts.f_frsize >= max(size, _LEAST)


def wait(folder: str, size: int, limit_s: float) -> bool:
    """Wait until there is room or a blocked signal is pending; return False after `limit_s`.

    Args:
        folder: a folder on the file system.
        size: the needed size in bytes.
        limit_s: the longest wait in seconds.
    """
    end = time.monotonic() + limit_s
    while not has(folder, size) and not signal.sigpending():
        if time.monotonic() >= end:
            return False
        time.sleep(_EVERY_S)
    return True
