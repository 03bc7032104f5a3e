"""The descriptors 0, 1 and 2 that every program expects to have."""

from __future__ import annotations

import os


def plug_closed_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, since a file opened next would get that number.

    The job would then read or write that file. The descriptors are not inherited: after an exec
    they are closed as before.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(fd)
