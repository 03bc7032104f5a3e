"""Rights that ordinary users lack: a test says which it needs, and it is tried.

`needs("mount")` marks a test, which is skipped where the right is missing: root in a container may
give files away and may not mount. `pytest -m rights` runs all that such rights are needed for.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import pytest

STRANGER, OTHER = 65534, 12345  # they need no entry in the table of users
_AS_OTHER = ("setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups")
_UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def needs(*rights: str) -> pytest.MarkDecorator:
    """Mark a test, or a module, that needs some of RIGHTS."""
    assert set(rights) <= set(RIGHTS)
    return pytest.mark.rights(*rights)


@functools.cache
def missing(right: str) -> str:
    """Return why this process has not one of RIGHTS; "" where it has."""
    try:
        why = RIGHTS[right]()
    except OSError as error:
        why = os.strerror(error.errno)
    return why and f"needs the right to {right}: {why}"


def _said(*command: str) -> str:
    """Return why a command fails, in words that are the same each time; "" where it succeeds."""
    if not shutil.which(command[0]):
        return f"no {command[0]}"
    return f"{command[0]} fails" if subprocess.run(command, capture_output=True).returncode else ""


def _become_others() -> str:
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, STRANGER, STRANGER)
    return _said(*_AS_OTHER, "true")


def _show_the_clone() -> str:
    return _said(*_AS_OTHER, "test", "-r", __file__) and "others may not read it"


def _mount() -> str:
    """Try it where tests do it: among the mounts of this process."""
    with tempfile.TemporaryDirectory() as place:
        why = _said("mount", "-t", "tmpfs", "none", place)
        return why or _said("umount", "-l", place)


def _make_namespaces() -> str:
    return _said(*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt")


def _make_devices() -> str:
    with tempfile.TemporaryDirectory() as place:
        os.mknod(f"{place}/node", 0o20600, os.makedev(1, 3))
    return ""


def _make_networks() -> str:
    if absent := [name for name in ("nsenter", "ip", "tc") if not shutil.which(name)]:
        return f"no {', '.join(absent)} (apt-get install iproute2 util-linux)"
    veth = ("link", "add", "name", "v0", "type", "veth", "peer", "name", "v1")
    return _said(*_UNSHARE, "--net", "ip", *veth)


RIGHTS: dict[str, Callable[[], str]] = {
    "become others": _become_others,  # and to give files away
    "show the clone": _show_the_clone,
    "mount": _mount,
    "make namespaces": _make_namespaces,
    "make devices": _make_devices,
    "make networks": _make_networks,
}
