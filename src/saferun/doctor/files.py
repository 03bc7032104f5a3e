"""Files of the kernel and the driver, read without a complaint: what is not there is empty."""

from __future__ import annotations

import os

_MOST_CHARACTERS = 1 << 22  # a busy machine's table of sockets


def text(path: str) -> str:
    """Return the beginning of a file; "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_CHARACTERS)
    except OSError:
        return ""


def names(folder: str) -> list[str]:
    """Return what lies in a directory, sorted; nothing where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
