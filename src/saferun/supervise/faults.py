"""Faults of saferun itself: they are worded and contained here, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def worded(what: str, error: Exception) -> str:
    """Return the line about a fault of saferun itself.

    Args:
        what: what could not be done.
        error: the exception.

    >>> worded("the checkpoints could not be looked at", KeyError("a"))
    "the checkpoints could not be looked at, a fault of saferun's own (KeyError: 'a')"
    """
    detail = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{what}, a fault of saferun's own ({detail})"


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
