"""Several users on one host: these tests are root's, who becomes the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

STRANGER, OTHER = 65534, 12345  # they need no entry in the table of users
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become several users")


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Have the rights of another user in this process; the modules that it needs are loaded."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextlib.contextmanager
def open_place() -> Iterator[str]:
    """Make a directory that every user can enter, with its parents."""
    place = tempfile.mkdtemp(prefix="saferun-users-", dir="/tmp")
    os.chmod(place, 0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
