"""The range check of labels and indices, and its message."""

from __future__ import annotations

from typing import Any

from ... import rank

_SHOWN = 5  # offending values that a message names


def check_range(name: str, values: Any, count: int, ignored: int | None) -> IndexError | None:
    """Check on the values' own device that they lie in a range, and wait for the result.

    Args:
        name: the function's name.
        values: labels or indices, a tensor of integers.
        count: the range is 0 … count-1.
        ignored: a label that is always allowed; None for indices.

    Returns:
        The exception for the script if a value is out of range.
    """
    wrong = (values < 0) | (values >= count)
    if ignored is not None:
        wrong &= values != ignored
    if not wrong.any().item():
        return None
    found = values[wrong]
    some = ", ".join(str(value) for value in found.unique()[:_SHOWN].tolist())
    more = ", …" if found.unique().numel() > _SHOWN else ""
    place = wrong.nonzero()[0].tolist()
    what, of = ("labels", "classes") if ignored is not None else ("indices", "rows in the table")
    beside = "" if ignored is None else f", or {ignored} to be ignored"
    text = (
        f"{name}: {what} out of range: {some}{more} ({found.numel()} of {values.numel()} values,"
        f" the first at {place}); there are {count} {of}: 0 to {count - 1}{beside}"
    )
    error = IndexError(text + on_rank())
    vars(error)["saferun_kind"] = "device-side-assert"  # cuda_failures.judged reads it
    return error


def on_rank() -> str:
    """Return the rank in brackets, for the end of a message; "" outside a rank."""
    number = rank.number()
    return "" if number is None else f" (rank {number})"
