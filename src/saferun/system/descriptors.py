"""The descriptors 0, 1 and 2 that every program expects to have."""

from __future__ import annotations

import os


def plug_closed_descriptors() -> None:
    """Put /dev/null where 0, 1 or 2 is closed: what is opened next would be taken for the job's.

    It is not inherited: after an exec they are as closed as they were.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(fd)
