"""Faults of saferun itself are contained here, and the job goes on; errors.py words them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def contained(work: Callable[[], T], otherwise: T, tell: Callable[[Exception], object]) -> T:
    """Do work that the job does not need; return its result, or another one after a fault.

    Args:
        work: the work.
        otherwise: the result after a fault.
        tell: function that reports the fault.
    """
    try:
        return work()
    except Exception as error:
        tell(error)
        return otherwise
