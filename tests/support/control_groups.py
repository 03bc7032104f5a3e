"""Control groups with little memory."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path("/sys/fs/cgroup")
# Root alone may, a container's is read-only, or none is mounted: whatever else fails is a fault.
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
FILES = {"memory.limit_in_bytes": "memory.memsw.limit_in_bytes", "memory.max": "memory.swap.max"}


@contextlib.contextmanager
def small_group(size: int) -> Iterator[Path]:
    """Make a control group that may use so many bytes, and no swap; skip where nobody may."""
    place = TOP / "memory" if (TOP / "memory").is_dir() else TOP
    group = place / f"saferun-test-{os.getpid()}"
    try:
        if (why := _made(group, size)) is not None:
            pytest.skip(f"control groups cannot be made here: {os.strerror(why)}")
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def _made(group: Path, size: int) -> int | None:
    """Make a group; return the error number where the machine grants none."""
    try:
        group.mkdir()
        limit = next((name for name in FILES if (group / name).exists()), "memory.max")
        (group / limit).write_text(str(size), encoding="utf-8")
        if (swap := group / FILES[limit]).exists():
            swap.write_text("0" if limit == "memory.max" else str(size), encoding="utf-8")
    except OSError as error:
        if error.errno in REFUSALS:
            return error.errno
        raise
    return None
