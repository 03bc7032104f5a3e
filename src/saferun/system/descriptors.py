"""The descriptors 0, 1 and 2 that every program expects to have."""

from __future__ import annotations

import os


def plug_closed_descriptors() -> None:
    """Open /dev/null as 0, 1 or 2 if that is closed: the next open file would get its number.

    The job would then use that file. The new descriptors are not inherited: after an exec they are
    closed as before.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(fd)
