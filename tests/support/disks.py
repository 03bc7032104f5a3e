"""Disks that are soon full."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import rights


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a disk of a size, such as "64k", at a new directory; skip where nobody may mount."""
    if why := rights.missing("mount"):
        pytest.skip(why)
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
