"""Several users on one host: a test that needs("become others") becomes them."""

import contextlib
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator


def name_of(uid: int) -> str:
    """Return the name of a user; its number where the machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Have the rights of another user in this process; the modules that it needs are loaded."""
    own, groups = (os.geteuid(), os.getegid()), os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(own[0])
        os.setegid(own[1])
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
