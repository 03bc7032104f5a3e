"""Disks that are soon full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a disk of a size, such as "64k", at a new directory; skip where nobody may mount."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs (root, CAP_SYS_ADMIN)")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
